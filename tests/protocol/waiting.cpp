// Waits of a rank on a clock that advances by their polls, yields and naps. Counting these determines a wait's duration
// and the share of it that leaves the core to others, on machines of any speed.
//
// Usage: waiting cpu|gpu|nodes|gpu_nodes|left TIMEOUT_S NUM_RANKS LATE_S...
//        waiting lost|interrupted|passed|abandoned TIMEOUT_S NUM_RANKS
//        waiting words TIMEOUT_S NUM_RANKS
//
// First form: rank 0's first peers announce after LATE_S each, the others never. If LATE_S begins with "blamed:", the
// last rank announces then that it has timed out on rank 0; with "woken:" rank 0 is frozen from then on, and finds that
// poison word when it resumes. With "other:" the last rank has timed out on rank 1, with "dead:" it has found rank 0
// dead. With "gone:" the last rank fails, and the peer closes its buffer, between two looks of rank 0. With "nodes" a
// CPU rank has half of the ranks on its node, and ranks of the other node forward their signals; with "gpu_nodes" a GPU
// has. "left" is as "nodes", but the network loses these ranks, since the last rank has failed; its poison word arrives
// just before.
//
// Second form: all other ranks are on other nodes and rank 0 awaits their rows, when the network loses the last of them
// ("lost"), or a signal arrives ("interrupted"). Or it awaits what one rank passes on of another, and the network loses
// the first of the two ("abandoned") or the second ("passed").
//
// Prints the code that ends the op, the peer it names, the op's duration, and the time in naps.
//
// Third form: prints the last words of the last rank in quotes, read over a network that works, that has lost the rank
// and that never completes the request.
#include <sched.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "../../cuda/cpu/engine.h"
#include "../../cuda/gpu/exchange.h"
#include "../../cuda/net/mapped_network.h"

using namespace moe_rt;

namespace {

constexpr int64_t kSecond = 1'000'000'000, kLookNs = 50, kYieldNs = 500, kGpuNapNs = 200;

struct Arrival {
  int64_t when;
  uint64_t *where, word;
  int64_t frozen_ns = 0;  // time frozen before a poll
  bool in_look = false;   // only while the clock is read, between two looks at shared memory
};

std::vector<Arrival> arrivals;
int64_t now_ns = kSecond, napped_ns = 0;

void advance(int64_t ns, bool in_look = false) {
  now_ns += ns;
  for (Arrival& a : arrivals) {
    if (now_ns < a.when || (a.in_look && !in_look)) continue;
    now_ns += std::exchange(a.frozen_ns, 0);
    *a.where = a.word;
  }
}

}  // namespace

// Replace the C library's functions, also for the standard library.
extern "C" int clock_gettime(clockid_t, timespec* when) noexcept {
  advance(kLookNs, true);
  *when = {now_ns / kSecond, now_ns % kSecond};
  return 0;
}

extern "C" int sched_yield() noexcept {
  advance(kYieldNs);
  return 0;
}

extern "C" int nanosleep(const timespec* nap, timespec*) {
  const int64_t ns = nap->tv_sec * kSecond + nap->tv_nsec;
  advance(ns), napped_ns += ns;
  return 0;
}

namespace {

// A GPU of one lane.
template <bool kOnNodes>
struct Gpu {
  static constexpr bool kTwoLevel = kOnNodes, kOrderedSignals = true;
  BlockShared& shared_;
  Solo block() const { return {}; }
  BlockShared& shared() const { return shared_; }
  MappedLink link() const { return {}; }
  int64_t clock_ns() const {
    advance(kLookNs);
    return now_ns;
  }
  void nap() const { advance(kGpuNapNs), napped_ns += kGpuNapNs; }
  void await_launch_before() const {}  // no launch precedes it
};

class LosingNetwork final : public MappedNetwork {
 public:
  LosingNetwork(const std::vector<uint64_t>& segments, const Shape& shape, uint64_t& poison)
      : MappedNetwork(segments, shape, 0), poison_(poison), last_(shape.num_ranks - 1) {}
  bool lost(int) const override {
    poison_ = poison_word(Code::kInterrupted, last_, -1);
    return true;
  }

 private:
  uint64_t& poison_;
  int last_;
};

// A network on which rows of the last rank never arrive.
class SilentNetwork final : public MappedNetwork {
 public:
  SilentNetwork(const std::vector<uint64_t>& segments, const Shape& shape, bool loses)
      : MappedNetwork(segments, shape, 0), loses_(loses), last_(shape.num_ranks - 1) {}
  bool flushed(int peer) const override { return peer < last_ || loses_; }
  bool lost(int peer) const override { return peer == last_ && loses_; }

 private:
  bool loses_;
  int last_;
};

Status wait_for_rows(const World& world, bool loses, double timeout_s) {
  std::vector<char*> remote(world.shape.num_ranks, nullptr);
  remote[0] = world.base[0];
  SilentNetwork network(std::vector<uint64_t>(remote.size(), uint64_t(remote[0])), world.shape, loses);
  RemoteNetwork peers(remote, network);
  const uint64_t seq[kNumKinds] = {1, 0};
  bool (*const interrupted)() = [] { return true; };
  HostIdle idle(world, Op::kDispatch, 1, seq, timeout_s, true, loses ? nullptr : interrupted, &network);
  return peers.settle(peers.ranks(), Phase::kGather, idle);
}

void print_last_words(const World& world) {
  const int last = world.shape.num_ranks - 1;
  write_last_words(*world.at<LastWords>(last, world.layout.last_words), "words");
  const std::vector<uint64_t> segments(world.shape.num_ranks, uint64_t(world.base[0]));
  MappedNetwork works(segments, world.shape, 0);
  SilentNetwork lost(segments, world.shape, true), silent(segments, world.shape, false);
  for (Network* network : std::initializer_list<Network*>{&works, &lost, &silent}) {
    RemoteNetwork peers(std::vector<char*>(segments.size(), nullptr), *network);
    std::printf("'%s' ", peers.last_words(world, last).c_str());
  }
}

// Waits for the combine of `source`, which `announcer` passes on.
Status wait_for_passed_on(const World& world, int source, int announcer, double timeout_s) {
  SilentNetwork network(std::vector<uint64_t>(world.shape.num_ranks, uint64_t(world.base[0])), world.shape, true);
  const uint64_t seq[kNumKinds] = {0, 1};
  HostIdle idle(world, Op::kCombine, 1, seq, timeout_s, true, nullptr, &network);
  idle.watch({.peer = source, .announcer = announcer, .passed_on = true, .in_order = false});
  return {.code = wait_signal(world.mailbox(0, Kind::kCombine, source), 1, idle), .peer = announcer};
}

Status wait_on_cpu(const EngineConfig& config) {
  Engine engine(config);
  return engine.refuse(Op::kDispatch, Code::kInvalidInput, 0, 0, 0);
}

template <bool kOnNodes>
Status wait_on_gpu(const World& world, double timeout_s) {
  DeviceState state{};
  state.seq[static_cast<int>(Kind::kDispatch)] = 1;
  HostRecord record{};
  BlockShared shared{};
  const Control control{&state, &record, static_cast<int64_t>(timeout_s * kSecond), 0, 0};
  finish(Gpu<kOnNodes>{shared}, world, control, {.op = Op::kDispatch, .tag = 0}, [](uint64_t, int) {}, [] {});
  return record.status;
}

// Lets happen what an argument LATE_S says of a peer.
void arrive(const World& world, int peer, const char* late) {
  const char* const colon = std::strchr(late, ':');
  const auto late_ns = static_cast<int64_t>(std::atof(colon ? colon + 1 : late) * kSecond);
  if (late[0] == 'g') {
    const uint64_t word = poison_word(Code::kInvalidInput, world.shape.num_ranks - 1, -1);
    arrivals.push_back({now_ns + late_ns, &world.poison(0), word, 0, true});
    arrivals.push_back({now_ns + late_ns, &world.mailbox(0, Kind::kDispatch, peer).closed, 1, 0, true});
  } else if (colon) {
    const int64_t frozen_ns = late[0] == 'w' ? 10 * kSecond : 0;
    const Code code = late[0] == 'd' ? Code::kPeerDead : Code::kPeerTimeout;
    const uint64_t word = poison_word(code, world.shape.num_ranks - 1, late[0] == 'o' ? 1 : 0);
    arrivals.push_back({now_ns + late_ns, &world.poison(0), word, frozen_ns});
  } else {
    arrivals.push_back({now_ns + late_ns, &world.mailbox(0, Kind::kDispatch, peer).signal, 1});
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const auto is = [argv](const char* form) { return std::strcmp(argv[1], form) == 0; };
  const bool leaves = is("left"), cpu_on_nodes = leaves || is("nodes"), on_cpu = cpu_on_nodes || is("cpu");
  const bool gpu_on_nodes = is("gpu_nodes"), on_nodes = cpu_on_nodes || gpu_on_nodes;
  const double timeout_s = std::atof(argv[2]);
  const int num_ranks = std::atoi(argv[3]);
  std::vector<int32_t> node_of;
  for (int r = 0; r < num_ranks && on_nodes; ++r) node_of.push_back(r < num_ranks / 2 ? 0 : 1);
  const Shape shape = NodeTables::sized({num_ranks, num_ranks, 1, 1, 1, 4, 4}, node_of);
  const Layout layout = Layout::make(shape);
  // All ranks share one segment: rank 0's headers for its peers go to mailboxes that it does not read.
  const std::unique_ptr<char[]> memory(new char[layout.bytes + kPage]());
  char* const segment = memory.get() + kPage - reinterpret_cast<uintptr_t>(memory.get()) % kPage;
  const std::vector<char*> base(num_ranks, segment);
  const NodeTables tables(node_of, 0);
  const World world{shape, layout, {}, base.data(), nullptr, 0, 1, 1, on_nodes ? tables.view() : Nodes{}};
  if (is("words")) return print_last_words(world), 0;
  world.mailbox(0, Kind::kDispatch, 0).signal = 1;
  for (int i = 4; i < argc; ++i) arrive(world, i - 3, argv[i]);
  std::vector<int32_t> expert_rank(num_ranks);
  for (int r = 0; r < num_ranks; ++r) expert_rank[r] = r;
  std::vector<uint64_t> segments(num_ranks, uint64_t(segment));
  std::shared_ptr<Network> network = std::make_shared<MappedNetwork>(segments, shape, 0);
  if (leaves) network = std::make_shared<LosingNetwork>(segments, shape, world.poison(0));
  for (int r = num_ranks / 2; r < num_ranks && on_nodes; ++r) segments[r] = 0;
  const int64_t start_ns = now_ns;
  const bool loses = is("lost"), for_rows = loses || is("interrupted");
  const Status status = is("abandoned") ? wait_for_passed_on(world, num_ranks - 2, num_ranks - 1, timeout_s)
                        : is("passed")  ? wait_for_passed_on(world, num_ranks - 1, num_ranks - 2, timeout_s)
                        : for_rows      ? wait_for_rows(world, loses, timeout_s)
                        : on_cpu        ? wait_on_cpu({.shape = shape,
                                                       .elem = rows::Elem::kFloat32,
                                                       .rank = 0,
                                                       .config_hash = 1,
                                                       .expert_rank = expert_rank,
                                                       .node_of = node_of,
                                                       .segments = segments,
                                                       .watches = {},
                                                       .timeout_s = timeout_s,
                                                       .dispatch_codec = Codec::kRaw,
                                                       .combine_codec = Codec::kRaw,
                                                       .drop_overflow = false,
                                                       .num_lanes = 1,
                                                       .isa = "portable",
                                                       .network = network})
                        : gpu_on_nodes  ? wait_on_gpu<true>(world, timeout_s)
                                        : wait_on_gpu<false>(world, timeout_s);
  const auto seconds = [](int64_t ns) { return static_cast<double>(ns) / kSecond; };
  std::printf("%d %d %.9g %.9g\n", static_cast<int>(status.code), status.peer, seconds(now_ns - start_ns),
              seconds(napped_ns));
}
