// Fuzz target: whatever peers leave in shared memory, a rank's ops end with a known status, and a dispatch that was
// believed has a plan that points into its tensors.
//
// Peers publish valid state; then bytes of the input overwrite words of any segment, before any of the four ops:
// mailboxes, lists, rows, partials. Segments and tensors are heap allocations of exactly the protocol's size, so that a
// sanitizer reports the first byte out of bounds. With MOE_RT_EMULATED_GPU the rank runs the launches of a GPU.
#include <algorithm>
#include <memory>
#include <vector>

#include "bytes.h"
#include "group.h"
#include "pushed.h"

using namespace moe_rt;
using fuzz::expect;

namespace {

constexpr uint32_t kRowFormat = 9;
constexpr int kScaleBytes = 5;
constexpr uint32_t kTag = 1;
constexpr int kNumOps = 4;
constexpr Op kOps[kNumOps] = {Op::kDispatch, Op::kCombine, Op::kCombineBackward, Op::kDispatchBackward};

std::vector<int64_t> random_idx(fuzz::Bytes& in, const Shape& shape, int64_t num_tokens) {
  std::vector<int64_t> idx(num_tokens * shape.num_topk);
  for (int64_t& expert : idx) expert = in.between(0, shape.num_experts) - 1;
  return idx;
}

// Publish what the rank's peers would have announced by the end of all four ops. Their partials are zero.
template <class Acc>
void publish_peers(Group& group, fuzz::Bytes& in) {
  const Shape& shape = group.shape;
  const RuntimeDims dims{shape.hidden, shape.num_topk};
  for (int peer = 0; peer < shape.num_ranks; ++peer) {
    if (peer == group.me) continue;
    const World w = group.world(peer);
    const int64_t num_tokens = in.between(0, shape.num_max_tokens);
    const std::vector<int64_t> idx = random_idx(in, shape, num_tokens);
    const std::vector<Acc> weights(idx.size(), Acc(1));
    std::vector<int32_t> ints(LaneCounters::num_ints(shape, 1)), send_plan(idx.size());
    const LaneCounters counters{ints.data(), shape.num_experts, shape.num_ranks};
    const auto lists = RouteLists<Acc>::view(w, peer, 1);
    int64_t bad;
    count_visits(Solo{}, dims, w, idx.data(), num_tokens, counters, send_plan.data(), &bad);
    place_lanes(w, counters, 1, lists);
    write_lists(Solo{}, dims, w, idx.data(), weights.data(), num_tokens, counters, lists, send_plan.data());
    if (shape.num_pushed_tokens > 0) push_lists<Acc>(w, 1);
    for (const Op op : kOps) {
      const uint64_t seq = op == Op::kDispatch || op == Op::kCombine ? 1 : 2;
      Call call{.op = op, .tag = kTag, .handle_seq = op == Op::kDispatch ? uint64_t{0} : uint64_t{1}};
      call.num_tokens = int32_t(num_tokens);
      if (op == Op::kDispatch) call.max_tokens = shape.num_max_tokens, call.capacity = int32_t(group.capacity[peer]);
      if (op == Op::kDispatch && group.scaled) call.row_format = kRowFormat;
      post(w.mailbox(group.me, kind_of(op), peer), w.header(seq, call));
    }
  }
}

// Overwrite words of segments. The input chooses the rank, region, word and value; or it shifts a word and the next
// together, as if a list had moved, or in opposite directions, which keeps a sum. Return true if any word was chosen.
bool scribble(Group& group, fuzz::Bytes& in) {
  const Layout layout = Layout::make(group.shape);
  std::vector<int64_t> regions{layout.poison};
  for (const Layout::Window& w : layout.window) {
    for (const int64_t at :
         {w.counts, w.pull_offs, w.copy_offs, w.pulls, w.copies, w.weights, w.tokens, w.partials, w.scalars}) {
      if (at != w.scalars || !group.shape.returns_entries()) regions.push_back(at);  // else it is empty
    }
    if (layout.pushed.bytes > 0) regions.push_back(w.pushed);
    if (group.shape.num_pushed_rows > 0) regions.push_back(w.pushed_rows);
  }
  regions.push_back(layout.bytes);
  const int count = in.between(0, 15);
  for (int i = 0; i < count && !in.empty(); ++i) {
    char* const segment = group.base[in.between(0, group.shape.num_ranks - 1)];
    const int region = in.between(0, static_cast<int>(regions.size()) - 2);
    const int64_t words = (regions[region + 1] - regions[region]) / 4, word = in.take<uint16_t>() % words;
    const int kind = in.between(0, 2);
    const auto value = in.take<uint32_t>();
    auto* const at = reinterpret_cast<uint32_t*>(segment + regions[region]) + word;
    at[0] = kind == 0 ? value : at[0] + value;
    if (kind != 0 && word + 1 < words) at[1] += kind == 1 ? value : 0u - value;
  }
  return count > 0;
}

template <class Acc>
struct Tensors {
  int64_t num_tokens, max_tokens, capacity, hidden;
  bool by_token;
  std::vector<int64_t> idx;
  std::vector<Acc> x, weights, recv_x, recv_weights, out, grad_y, grad_recv_weights, grad_weights;
  std::vector<int32_t> offs, recv_plan, send_plan;
  std::vector<char> codes, scales, recv_codes, recv_scales;  // used instead of x and recv_x

  Tensors(const Group& group, fuzz::Bytes& in) {
    constexpr int32_t kWild = 0x7f7f7f7f;  // an index remote out of bounds marks values never written
    const Shape& s = group.shape;
    const int64_t num_local = group.num_local(group.me);
    capacity = group.capacity[group.me], by_token = s.by_token();
    const int64_t num_weights = by_token ? capacity * s.num_topk : capacity;
    num_tokens = in.between(0, s.num_max_tokens), max_tokens = s.num_max_tokens;
    idx = random_idx(in, s, num_tokens);
    x.resize(num_tokens * s.hidden, Acc(1)), weights.resize(idx.size(), Acc(1)), grad_weights.resize(idx.size());
    out.resize(x.size()), recv_x.resize(capacity * s.hidden), grad_y.resize(capacity * s.hidden);
    recv_weights.resize(num_weights), grad_recv_weights.resize(num_weights);
    offs.resize(by_token ? s.num_ranks : num_local, kWild), send_plan.resize(idx.size(), kWild);
    recv_plan.resize(RecvPlan::num_ints(s, static_cast<int>(num_local)), kWild);
    hidden = s.hidden;
    codes.resize(num_tokens * hidden), scales.resize(num_tokens * kScaleBytes);
    recv_codes.resize(capacity * hidden), recv_scales.resize(capacity * kScaleBytes);
  }
  // Factors of combine and its backward, which take no weights if rows belong to tokens.
  Acc* factors() { return by_token ? nullptr : recv_weights.data(); }
  int64_t num_factors() const { return by_token ? kAnyCapacity : capacity; }
};

// Check a dispatch that was believed: everything that later ops use as an index is in range.
template <class Acc>
void check_plan(Group& group, Tensors<Acc>& t) {
  const Shape& s = group.shape;
  const int num_local = group.num_local(group.me);
  const int64_t capacity = group.capacity[group.me];
  const RecvPlan plan = RecvPlan::view(t.recv_plan.data(), s, num_local);
  const int64_t pulled = plan.head->num_pulled, copies = plan.head->num_copies;
#if !defined(MOE_RT_EMULATED_GPU)  // it follows only what a token names
  expect(plan.leads_inside(group.world(group.me)), "this rank will be blamed for its own plan");
#endif
  expect(pulled >= 0 && pulled <= RecvPlan::max_pulled(s), "num_pulled out of range");
  expect(copies >= 0 && copies <= RecvPlan::max_copies(s, num_local), "num_copies out of range");
  expect(std::is_sorted(t.offs.begin(), t.offs.end()), "offs decrease");
  expect(t.offs.front() >= 0 && t.offs.back() == std::min(t.by_token ? pulled : copies, capacity), "offs out of range");
  for (int64_t i = 0; t.by_token && i < int64_t{t.offs.back()} * s.num_topk; ++i) {
    expect(plan.ids[i] >= kNoExpert && plan.ids[i] < num_local, "a row for an expert that is not here");
  }
  for (int64_t i = 0; i < pulled; ++i) {
    const Pulled& p = plan.pulled[i];
    expect(p.source >= 0 && p.source < s.num_ranks, "a pulled token of no rank");
    expect(p.token >= 0 && p.token < s.num_max_tokens, "a pulled token out of range");
    expect(p.slot >= 0 && p.slot < s.num_node_slots(), "a slot out of range");
    expect(p.copies > 0 && p.copies <= s.num_topk && p.first >= 0 && p.first <= copies - p.copies,
           "a range out of bounds");
    for (int c = p.first; c < p.first + p.copies; ++c) {
      const int32_t row = plan.rows[c];
      expect(row == kDropped || (row >= 0 && row < t.offs.back()), "a row out of range");
      expect(plan.ks[c] >= 0 && plan.ks[c] < s.num_topk, "a k out of range");
    }
  }
}

template <class Acc>
Status run(Rank& rank, Op op, Tensors<Acc>& t, bool scaled) {
  switch (op) {
    case Op::kDispatch: {
      DispatchArgs args{t.x.data(),         t.idx.data(),      sizeof(int64_t), t.weights.data(),      t.num_tokens,
                        t.max_tokens,       t.capacity,        t.recv_x.data(), t.recv_weights.data(), t.offs.data(),
                        t.recv_plan.data(), t.send_plan.data()};
      if (scaled) {
        args.x = t.codes.data(), args.recv_x = t.recv_codes.data();
        args.scaled = {kRowFormat, t.scales.data(), t.recv_scales.data(), t.hidden, kScaleBytes};
      }
      return rank.dispatch(args, kTag);
    }
    case Op::kCombineBackward:
      return rank.combine_backward(
          {t.x.data(), t.num_tokens, t.by_token ? nullptr : t.recv_x.data(), t.factors(), t.capacity, t.num_factors(),
           t.recv_plan.data(), t.grad_y.data(), t.by_token ? nullptr : t.grad_recv_weights.data()},
          kTag);
    default:
      return rank.combine({op, t.recv_x.data(), op == Op::kCombine ? t.factors() : nullptr,
                           op == Op::kCombine ? nullptr : t.grad_recv_weights.data(), t.capacity,
                           op == Op::kCombine ? t.num_factors() : t.capacity, t.recv_plan.data(), t.send_plan.data(),
                           t.num_tokens, t.out.data(), op == Op::kCombine ? nullptr : t.grad_weights.data()},
                          kTag);
  }
}

template <class Acc>
void run_ops(Group& group, fuzz::Bytes& in) {
  publish_peers<Acc>(group, in);
  Tensors<Acc> tensors(group, in);
  Rank rank(group.config());
  bool touched = false;
  for (const Op op : kOps) {
    touched = scribble(group, in) || touched;
    const Status status = run(rank, op, tensors, group.scaled);
    switch (status.code) {
      case Code::kOk:
        break;
      case Code::kCapacityOverflow:  // rows of valid peers may also overflow
        return;
      case Code::kInvalidInput:
      case Code::kInvalidRouting:
      case Code::kTooManyTokens:
      case Code::kConfigMismatch:
      case Code::kCallOrderMismatch:
      case Code::kCorruptPeer:
      case Code::kPeerTimeout:
      case Code::kPeerClosed:
      case Code::kPoisoned:
      case Code::kBoundMismatch:
      case Code::kRowFormatMismatch:
        expect(touched, "an op among honest peers failed");
        return;
      default:
        expect(false, "an op ended with a code that a peer cannot cause");
    }
    if (op == Op::kDispatch) check_plan(group, tensors);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const bool with_scales : {false, true}) {
    fuzz::Bytes in(data, size);
    Group group(in, with_scales);
#if !defined(MOE_RT_EMULATED_GPU)  // its kernels here are fp32
    if (group.elem == rows::Elem::kFloat64) {
      run_ops<double>(group, in);
      continue;
    }
#endif
    run_ops<float>(group, in);
  }
  return 0;
}
