// Free-running chains of dispatch, combine and both backwards between ranks that are threads, each with a team of
// lanes, or, with MOE_RT_EMULATED_GPU, a GPU of blocks and lanes.
//
// In runs with a late rank, one rank at a time ends its op after all others have: they need what its network's thread
// does while it computes.
//
// Built with ThreadSanitizer by test_races.py: ranks share one mapping, so a missing order shows as a data race. Every
// output is checked, so that a window reused too early shows even if the detector misses it. Exits with 0 if all is
// right.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "../device/emulated_engine.h"
#include "late_network.h"

using namespace moe_rt;

namespace {

constexpr int kHidden = 24, kTopk = 3, kExperts = 8;
int most_tokens = 9;  // per rank; set before any rank exists
bool one_is_late = false;
[[maybe_unused]] uint64_t num_ended = 0;  // ops that all ranks have ended, if one is late
constexpr int kScales = 4;                // scales per row, if any; its bytes are then codes

#if defined(MOE_RT_EMULATED_GPU)
using Rank = emulation::Engine<kHidden, kTopk>;
#else
using Rank = Engine;
#endif

float element(int rank, int round, int token, int column) {
  return static_cast<float>((rank * 131 + round * 17 + token * 3 + column) % 251);
}

struct Tensors {
  std::vector<float> x, weights, recv_x, recv_weights, out, grad_y, grad_recv_weights, grad_x, grad_weights;
  std::vector<int64_t> idx;
  std::vector<int32_t> offs, recv_plan, send_plan;
  std::vector<float> scales, recv_scales;
  int64_t capacity;
  bool by_token;
  const int32_t* ids;  // in recv_plan

  // Factors of combine and its backward, which take no weights if rows belong to tokens.
  float* factors() { return by_token ? nullptr : recv_weights.data(); }
  int64_t num_factors() const { return by_token ? kAnyCapacity : capacity; }
  ScaledArgs scaled() {
    if (scales.empty()) return {};
    return {1, scales.data(), recv_scales.data(), kHidden * 4, kScales * 4};
  }
};

Tensors make_tensors(const Shape& shape, int num_local, int64_t capacity, bool with_scales) {
  Tensors t;
  if (with_scales) t.scales.resize(most_tokens * kScales), t.recv_scales.resize(capacity * kScales);
  t.x.resize(most_tokens * kHidden), t.out.resize(most_tokens * kHidden), t.grad_x.resize(most_tokens * kHidden);
  t.weights.assign(most_tokens * kTopk, 1.0f), t.grad_weights.resize(most_tokens * kTopk),
      t.idx.resize(most_tokens * kTopk);
  t.capacity = capacity, t.by_token = shape.by_token();
  t.recv_x.resize(capacity * kHidden), t.grad_y.resize(capacity * kHidden);
  const int64_t num_weights = t.by_token ? capacity * kTopk : capacity;
  t.recv_weights.resize(num_weights), t.grad_recv_weights.resize(num_weights);
  t.offs.resize(t.by_token ? shape.num_ranks : num_local), t.recv_plan.resize(RecvPlan::num_ints(shape, num_local));
  t.send_plan.resize(most_tokens * kTopk);
  return t;
}

void expect(bool condition, const char* what, int rank, int round) {
  if (condition) return;
  std::fprintf(stderr, "rank %d, round %d: %s\n", rank, round, what);
  std::exit(1);
}

void expect_ok(const Status& s, const char* op, int rank, int round) {
  if (s.ok()) return;
  std::fprintf(stderr, "rank %d, round %d: %s ended with code %d, peer %d\n", rank, round, op, static_cast<int>(s.code),
               s.peer);
  std::exit(1);
}

// Ops of one rank that are under way, in the order in which they end.
struct UnderWay {
  int depth, num_ranks, count = 0;
  std::deque<std::function<void()>> ends{};

  void end_first() {
    ends.front()();
    ends.pop_front();
  }
  void end_all() {
    while (!ends.empty()) end_first();
  }
};

// Experts are the identity and every gradient starts as x, so that out = grad_x = (number of distinct experts) * x.
struct Microbatch {
  Tensors t;
  int rank, round, num_tokens;
  UnderWay* under_way;
  bool begun = false;  // one of its ops is under way

  void fill(std::mt19937& random) {
    num_tokens = static_cast<int>(random() % (most_tokens + 1));
    for (int token = 0; token < num_tokens; ++token) {
      for (int c = 0; c < kHidden; ++c) t.x[token * kHidden + c] = element(rank, round, token, c);
      std::copy_n(&t.x[token * kHidden], t.scales.empty() ? 0 : kScales, t.scales.begin() + token * kScales);
      for (int k = 0; k < kTopk; ++k) t.idx[token * kTopk + k] = static_cast<int>(random() % (kExperts + 1)) - 1;
    }
  }
  void dispatch(Rank& engine) {
    const auto args = std::make_shared<const DispatchArgs>(DispatchArgs{
        t.x.data(), t.idx.data(), sizeof(int64_t), t.weights.data(), num_tokens, most_tokens, t.capacity,
        t.recv_x.data(), t.recv_weights.data(), t.offs.data(), t.recv_plan.data(), t.send_plan.data(), t.scaled()});
    run(
        "dispatch", [&engine, args](auto... half) { return engine.dispatch(*args, 1, half...); },
        [this] { take_rows(); });
  }
  void take_rows() {
    for (int i = 0; i < t.offs.back() && !t.scales.empty(); ++i) {
      expect(std::equal(&t.recv_x[i * kHidden], &t.recv_x[i * kHidden] + kScales, &t.recv_scales[i * kScales]),
             "a row has the scales of another", rank, round);
    }
    // A row's weight is 1 for each entry that named it; undo that, so that each distinct expert counts once.
    for (int i = 0; i < t.offs.back() && !t.by_token; ++i) t.recv_weights[i] = 1.0f;
    if (t.by_token) add_experts(t.recv_x);
  }
  // Sum the outputs of each row's experts: if rows belong to tokens, experts do this themselves.
  void add_experts(std::vector<float>& rows) const {
    for (int i = 0; i < t.offs.back(); ++i) {
      const int32_t* const ids = t.ids + int64_t{i} * kTopk;
      const auto here = static_cast<float>(kTopk - std::count(ids, ids + kTopk, kNoExpert));
      for (int c = 0; c < kHidden; ++c) rows[i * kHidden + c] *= here;
    }
  }
  // Compute the gradients of the weights that the experts applied, and of their inputs.
  void differentiate_experts() {
    for (int i = 0; i < t.offs.back(); ++i) {
      float square = 0;
      for (int c = 0; c < kHidden; ++c) square += t.grad_y[i * kHidden + c] * t.grad_y[i * kHidden + c];
      std::fill_n(&t.grad_recv_weights[i * kTopk], kTopk, square);
    }
    add_experts(t.grad_y);
  }
  void combine(Rank& engine) {
    const auto args = std::make_shared<const CombineArgs>(
        CombineArgs{Op::kCombine, t.recv_x.data(), t.factors(), nullptr, t.capacity, t.num_factors(),
                    t.recv_plan.data(), t.send_plan.data(), num_tokens, t.out.data(), nullptr});
    run("combine", [&engine, args](auto... half) { return engine.combine(*args, 1, half...); });
  }
  void combine_backward(Rank& engine) {
    const auto args = std::make_shared<const CombineBackwardArgs>(CombineBackwardArgs{
        t.x.data(), num_tokens, t.by_token ? nullptr : t.recv_x.data(), t.factors(), t.capacity, t.num_factors(),
        t.recv_plan.data(), t.grad_y.data(), t.by_token ? nullptr : t.grad_recv_weights.data()});
    run(
        "combine backward", [&engine, args](auto... half) { return engine.combine_backward(*args, 1, half...); },
        [this] {
          if (t.by_token) differentiate_experts();
        });
  }
  void dispatch_backward(Rank& engine) {
    const auto args = std::make_shared<const CombineArgs>(
        CombineArgs{Op::kDispatchBackward, t.grad_y.data(), nullptr, t.grad_recv_weights.data(), t.capacity, t.capacity,
                    t.recv_plan.data(), t.send_plan.data(), num_tokens, t.grad_x.data(), t.grad_weights.data()});
    run("dispatch backward", [&engine, args](auto... half) { return engine.combine(*args, 1, half...); });
  }
  // Runs an op whole or, on a CPU, in halves with a pause in between, and then what follows it; ranks differ.
  template <class Op>
  void run(const char* what, const Op& op, const std::function<void()>& then = [] {}) {
    while (begun) under_way->end_first();
#if !defined(MOE_RT_EMULATED_GPU)
    if (one_is_late) {
      run_with_a_late_rank(what, op);
      return then();
    }
    if ((rank + round) % 2 == 0 && ++under_way->count % 4 != 0) {
      if (int(under_way->ends.size()) == under_way->depth) under_way->end_first();
      expect_ok(op(Half::kFirst), what, rank, round);
      begun = true;
      under_way->ends.push_back([this, what, op, then] {
        if (round % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
        expect_ok(op(Half::kSecond), what, rank, round);
        begun = false;
        then();
      });
      return;
    }
#endif
    under_way->end_all();
    expect_ok(op(), what, rank, round);
    then();
  }
#if !defined(MOE_RT_EMULATED_GPU)
  // Ranks take turns in being late: the late one begins an op, and ends it once all others have.
  template <class Op>
  void run_with_a_late_rank(const char* what, const Op& op) {
    const auto num_ranks = static_cast<uint64_t>(under_way->num_ranks), number = uint64_t(under_way->count++);
    const bool late = number / 4 % num_ranks == static_cast<uint64_t>(rank);
    expect_ok(op(Half::kFirst), what, rank, round);
    const uint64_t others = number * num_ranks + num_ranks - 1;
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    while (late && load_acquire(num_ended) < others) {
      expect(std::chrono::steady_clock::now() < until, "others wait for a rank that has begun", rank, round);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    expect_ok(op(Half::kSecond), what, rank, round);
    fetch_add_acq_rel(num_ended, uint64_t{1});
  }
#endif
  void check() const {
    for (int token = 0; token < num_tokens; ++token) {
      const int64_t* idx = &t.idx[token * kTopk];
      int distinct = 0;
      float square = 0;
      for (int k = 0; k < kTopk; ++k) {
        bool first = idx[k] >= 0;
        for (int j = 0; j < k; ++j) first = first && idx[j] != idx[k];
        distinct += first;
      }
      for (int c = 0; c < kHidden; ++c) {
        const float x = element(rank, round, token, c);
        square += x * x;
        expect(t.out[token * kHidden + c] == distinct * x, "combine delivered another row", rank, round);
        expect(t.grad_x[token * kHidden + c] == distinct * x, "dispatch backward delivered another row", rank, round);
      }
      for (int k = 0; k < kTopk; ++k) {
        expect(t.grad_weights[token * kTopk + k] == (idx[k] >= 0 ? square : 0.0f), "wrong weight gradient", rank,
               round);
      }
    }
  }
};

// Rounds have one, two or three microbatches in flight. In D C D C a window is written again once the combine has
// acknowledged it; in D D C C and D D D C C C windows take turns.
void run_rank(Rank& engine, const Shape& shape, int rank, int rounds, Tensors tensors, int num_local) {
  UnderWay under_way{shape.depth, shape.num_ranks};
  std::vector<Microbatch> batches(3, {std::move(tensors), rank, 0, 0, &under_way});
  std::mt19937 random(1234u + static_cast<unsigned>(rank));
  for (int round = 0; round < rounds; ++round) {
    batches.resize(1 + round % 3, batches[0]);
    for (Microbatch& b : batches) b.round = round, b.fill(random);
    for (Microbatch& b : batches) b.t.ids = b.t.recv_plan.data() + RecvPlan::ids_at(shape, num_local);
    for (Microbatch& b : batches) b.dispatch(engine);
    for (Microbatch& b : batches) b.combine(engine);
    for (Microbatch& b : batches) b.combine_backward(engine);
    for (Microbatch& b : batches) b.dispatch_backward(engine);
    under_way.end_all();
    for (Microbatch& b : batches) b.check();
    const unsigned pause = random() % 64;
    if (pause == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    if (pause < 8) std::this_thread::yield();
  }
}

// Weaken the order that the environment variable names, for the detector to report.
void weaken(std::string_view what) {
  if (what == "release") kRelease = kRelaxed;
  if (what == "last_block") kLastBlock = kRelaxed;
  if (what == "window_selector") selects_one_window = true;
  if (what == "wrap") compares_plainly = true;
}

// Arguments of the program.
struct Run {
  int num_ranks = 3, lanes = 3, rounds = 200;
  uint64_t first_seq = 1;
  bool by_token = false, invariant = false, with_scales = false;
  int num_nodes = 1;             // rank r is on node r % num_nodes, and maps no other node
  std::vector<int32_t> node_of;  // two levels only
  int depth = 1;

  Run(int argc, char** argv) {
    const auto is = [&](int i, std::string_view word) { return argc > i && argv[i] == word; };
    if (argc > 1) num_ranks = std::atoi(argv[1]);
    if (argc > 2) lanes = std::atoi(argv[2]);
    if (argc > 3) rounds = std::atoi(argv[3]);
    if (argc > 4) first_seq = std::strtoull(argv[4], nullptr, 10);
    by_token = is(5, "tokens"), invariant = is(5, "invariant");
    with_scales = is(6, "scales");
    if (argc > 7) num_nodes = std::atoi(argv[7]);
    if (argc > 8) most_tokens = std::atoi(argv[8]);
    for (int r = 0; r < num_ranks && is(9, "two_level"); ++r) node_of.push_back(r % num_nodes);
    if (argc > 10) depth = std::atoi(argv[10]);
    one_is_late = is(11, "late");
  }

  Shape shape() const {
    Shape shape{num_ranks, kExperts, most_tokens, kHidden,
                kTopk,     4,        4,           by_token ? RecvLayout::kTokens : RecvLayout::kExperts};
    shape = NodeTables::sized(shape, node_of);
    if (invariant) shape.sums = Sums::kInvariant;
    shape.depth = depth;
#if defined(MOE_RT_EMULATED_GPU)
    // Two ranks read lists from their peers; with four the lists are pushed, and with three also the rows.
    if (num_ranks > 2) shape.num_pushed_tokens = most_tokens;
    if (num_ranks == 3) shape.num_pushed_rows = most_tokens;
#endif
    return shape;
  }
  std::vector<int32_t> expert_rank() const {
    std::vector<int32_t> ranks;
    for (int e = 0; e < kExperts; ++e) ranks.push_back(e % num_ranks);
    return ranks;
  }
  int num_local(int rank) const { return (kExperts - rank + num_ranks - 1) / num_ranks; }
  int64_t capacity(int rank) const {
    return int64_t{num_ranks} * most_tokens * (by_token ? 1 : std::min(kTopk, num_local(rank)));
  }
};

// Segments of all ranks, whose mailboxes hold the sequence number before the first.
std::vector<uint64_t> make_segments(const Shape& shape, uint64_t first_seq) {
  const Layout layout = Layout::make(shape);
  const int num_kinds = shape.depth * kNumKinds;
  std::vector<uint64_t> segments;
  for (int r = 0; r < shape.num_ranks; ++r) {
    auto* const segment = static_cast<char*>(std::aligned_alloc(kPage, static_cast<size_t>(layout.bytes)));
    std::fill_n(segment, layout.bytes, 0);
    auto* const mailboxes = reinterpret_cast<Mailbox*>(segment + layout.mailboxes);
    for (int i = 0; i < num_kinds * shape.num_ranks; ++i) mailboxes[i].signal = first_seq - 1;
    segments.push_back(reinterpret_cast<uint64_t>(segment));
  }
  return segments;
}

std::unique_ptr<Rank> make_engine(const Run& run, const Shape& shape, const std::vector<uint64_t>& segments, int rank,
                                  std::shared_ptr<LateNetwork> network) {
  std::vector<uint64_t> mapped = segments;
#if !defined(MOE_RT_EMULATED_GPU)  // its launches know what a rank maps
  for (int peer = 0; peer < run.num_ranks; ++peer) {
    if ((peer - rank) % run.num_nodes != 0) mapped[peer] = 0;
  }
#endif
  return std::make_unique<Rank>(EngineConfig{.shape = shape,
                                             .elem = rows::Elem::kFloat32,
                                             .rank = rank,
                                             .config_hash = 7,
                                             .expert_rank = run.expert_rank(),
                                             .node_of = run.node_of,
                                             .segments = mapped,
                                             .watches = {},
                                             .timeout_s = 60.0,
                                             .dispatch_codec = Codec::kRaw,
                                             .combine_codec = Codec::kRaw,
                                             .drop_overflow = false,
                                             .num_lanes = run.lanes,
                                             .isa = "portable",
                                             .first_seq = run.first_seq,
                                             .network = std::move(network)});
}

#if !defined(MOE_RT_EMULATED_GPU)
// Closes an engine between the halves of an op: its proxy, which waits for neighbours, must do nothing any more.
void close_between_the_halves(const Run& run, const Shape& shape, Rank& engine, LateNetwork& network) {
  Tensors t = make_tensors(shape, run.num_local(0), run.capacity(0), run.with_scales);
  const DispatchArgs args{t.x.data(),         t.idx.data(),       sizeof(int64_t), t.weights.data(),      0,
                          most_tokens,        t.capacity,         t.recv_x.data(), t.recv_weights.data(), t.offs.data(),
                          t.recv_plan.data(), t.send_plan.data(), t.scaled()};
  expect_ok(engine.dispatch(args, 1, Half::kFirst), "the first half of an op that is left", 0, run.rounds);
  expect(network.go_on() == tuning::kLookAtNeighboursMs, "the proxy does not wait for its neighbours", 0, run.rounds);
  engine.close();
  expect(network.go_on() == Background::kNever, "the proxy of a closed rank goes on", 0, run.rounds);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  if (const char* const what = std::getenv("WEAKENED")) weaken(what);
  const Run run(argc, argv);
  const Shape shape = run.shape();
  const std::vector<uint64_t> segments = make_segments(shape, run.first_seq);
  std::vector<std::unique_ptr<Rank>> engines;
  std::vector<std::shared_ptr<LateNetwork>> networks;
  for (int r = 0; r < run.num_ranks; ++r) {
    networks.push_back(std::make_shared<LateNetwork>(segments, r));
    engines.push_back(make_engine(run, shape, segments, r, networks[r]));
  }
  std::vector<std::thread> ranks;
  for (int r = 0; r < run.num_ranks; ++r) {
    Tensors tensors = make_tensors(shape, run.num_local(r), run.capacity(r), run.with_scales);
    ranks.emplace_back([&, r, tensors] { run_rank(*engines[r], shape, r, run.rounds, tensors, run.num_local(r)); });
  }
  for (std::thread& t : ranks) t.join();
#if !defined(MOE_RT_EMULATED_GPU)
  if (one_is_late) close_between_the_halves(run, shape, *engines[0], *networks[0]);
#endif
  engines.clear();
  networks.clear();
  for (const uint64_t s : segments) std::free(reinterpret_cast<void*>(s));
  std::printf("%d ranks of %d lanes, %d rounds: every output as expected\n", run.num_ranks, run.lanes, run.rounds);
  return 0;
}
