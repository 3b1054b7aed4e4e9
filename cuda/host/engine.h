// The CPU engine of one rank: owns its sequence numbers and scratch, and runs each op as one call over mapped segments.
#pragma once

#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../protocol/core/calls.h"
#include "../protocol/core/window_selector.h"
#include "../protocol/flat/combine.h"
#include "../protocol/flat/dispatch.h"
#include "../protocol/flat/routing.h"
#include "cache_locality.h"
#include "far_peers.h"
#include "fault.h"
#include "forwarder.h"
#include "placement.h"
#include "scaled_rows.h"
#include "team.h"

namespace moe_rt {

struct EngineConfig {
  Shape shape;
  rows::Elem elem;
  int rank;
  uint64_t config_hash;
  std::vector<int32_t> expert_rank;  // [E]
  std::vector<int32_t> node_of{};    // [R] where rows go in two levels, else empty
  std::vector<uint64_t>
      segments;              // [R] addresses; each Layout::bytes long, zero-filled before first use; 0: not mapped
  std::vector<int> watches;  // [R] or empty; see HostIdle::watch
  double timeout_s;
  Codec dispatch_codec, combine_codec;  // how rows travel forward; gradients travel as they are
  bool drop_overflow;                   // false: overflow is refused by all ranks
  int num_lanes;
  std::string isa;
  uint64_t first_seq = 1;  // of either kind, with mailboxes that hold the one before: tests start close to a wrap
  Fault fault{};           // none, outside of tests
  int64_t cache_bytes = int64_t{32} << 20;  // of the last-level cache
  double near_ns = kNearNs;                 // most that a line takes from a cache that is shared
  int num_cores = static_cast<int>(std::thread::hardware_concurrency());  // that all ranks together may run on
  bool (*interrupted)() = nullptr;     // asked a few times a second in long waits; true ends the op, and the group
  std::shared_ptr<Network> network{};  // by which peers are reached that are not mapped
};

class Engine {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Each returns when this rank's part is done. `tag` names the layer; it must agree between ranks.
  Status dispatch(const DispatchArgs& args, uint32_t tag);
  Status combine(const CombineArgs& args, uint32_t tag);  // and dispatch backward
  Status combine_backward(const CombineBackwardArgs& args, uint32_t tag);

  // Takes part in an op only to say that this rank refuses it, so that every rank raises and none waits.
  Status refuse(Op op, Code code, int64_t got, int64_t expected, uint32_t tag);

  // Which token window the next op takes if it is a dispatch.
  int next_token_window() const { return windows_.next(Kind::kDispatch); }

  // After kCapacityOverflow: the rows that this rank would have received.
  int64_t needed_rows() const { return needed_rows_; }

  // Says why this rank is about to leave, for peers that learn of it. Idempotent: the first words stay.
  void leave_words(std::string_view text);
  // Those of a peer that is not mapped; empty where they cannot be had.
  std::string far_last_words(int peer) { return far_ ? far_->last_words(world_, peer) : std::string(); }
  // Tells every peer that this rank will not go on; their waits end. Idempotent: the first cause stays.
  void poison(Code code, int peer);
  // The failure that ended this group, if any; never blocks.
  Status health() const;
  // Local: tells peers that it has closed and refuses further ops. Idempotent. True when the segments may be unmapped:
  // not while another thread is inside an op.
  bool close();

  // The op of now, or the last one: when lane 0 began it, announced, had heard of everyone, and ended.
  const OpRecord& op_record() const { return op_record_; }
  // Bytes from which on this rank stores rows of a kind past the caches (rows.h).
  struct StreamFrom {
    int64_t published, received, pushed, combined;
  };
  const StreamFrom& stream_from() const { return stream_from_; }
  // [R] from the start of its wait until each peer's signal was seen, in rank order.
  const std::vector<int64_t>& arrival_ns() const { return arrival_ns_; }
  // [R] how long this rank has waited for each peer so far, looking at peers in rank order.
  std::vector<int64_t> waited_ns() const;
  const std::vector<double>& line_latency_ns() const { return cache_locality_.line_latency_ns(); }

 private:
  struct Pending;
  // What goes on over the network between the two halves of an op; of most there is nothing.
  static constexpr auto kNothing = [](auto&&...) { return Status{}; };
  template <class Fetch = decltype(kNothing), class Forward = decltype(kNothing)>
  struct Between {
    Fetch fetch{};      // (window, idle), by one lane: what is received from peers that are not mapped
    Forward forward{};  // (coop, window, idle): what this rank does for ranks of other nodes
  };
  template <class Fetch, class Forward>
  static Between<Fetch, Forward> between(Fetch fetch, Forward forward) {
    return {fetch, forward};
  }
  template <class Send, class Receive, class Middle = Between<>>
  Status run(const Call& call, Send&& send, Receive&& receive, const Status& refusal = {}, const Middle& middle = {});
  Pending open(const Call& call, const Status& refusal);
  template <class Fn>
  void run_lanes(Fn&& fn);
  template <class Coop, class Send>
  bool begin(const Coop& coop, Pending& op, Send&& send);
  template <class Coop, class Receive, class Middle>
  void finish(const Coop& coop, Pending& op, Receive&& receive, const Middle& middle);
  template <class Coop, class Forward>
  void forward(const Coop& coop, Pending& op, const Forward& forward);
  template <class Coop>
  bool goes_on(const Coop& coop, Point point, Pending& op);
  Status post_all(Pending& op);
  Status wait_for(Pending& op, bool first_ones);
  Status wait_all(Pending& op);
  Status judge_headers(const Header& ours, bool first_ones) const;
  HostIdle idle(Op op) const;
  void settle(Pending& op);
  template <class Fn>
  void with_link(int window, Fn&& fn) const;
  Status fail(Status status);
  void reach_far();
  void set_stream_from();
  void record(int64_t OpRecord::* step, std::chrono::steady_clock::time_point when);
  // For an op that writes n rows of a kind that is streamed from so many bytes on.
  template <class Acc>
  rows::HostRows<Acc> row_ops(int64_t n, int64_t stream_from, Codec codec) const;
  // The same for rows with scales, which a dispatch publishes or delivers.
  rows::HostScaledRows scaled_rows(const ScaledArgs& args, int64_t n, int64_t stream_from) const;
  static constexpr int kScratchRows = 3;  // of a lane
  char* scratch_row(int lane, int which = 0) {
    return scratch_rows_[(lane * kScratchRows + which) * world_.shape.row_bytes() / sizeof(Line)].bytes;
  }

  template <class Args>
  Status judge(Op op, const RecvPlan& plan, const int32_t* send_plan, const Args& args) const;
  bool out_overlaps_rows(const CombineArgs& args) const;
  template <class Acc>
  Status typed_dispatch(const DispatchArgs& args, uint32_t tag);
  template <class Acc>
  Status typed_combine(const CombineArgs& args, uint32_t tag);
  template <class Acc>
  Status typed_combine_backward(const CombineBackwardArgs& args, uint32_t tag);

  EngineConfig config_;
  World world_{};
  RuntimeDims dims_;
  const rows::Table* table_;
  PlacementTables placement_;
  NodeTables nodes_;
  std::vector<char*> base_;
  std::shared_ptr<FarNetwork> far_;  // where some peer is not mapped: one of the next two
  FarPeers* far_peers_ = nullptr;
  Forwarder* forwarder_ = nullptr;
  int num_mapped_;
  std::vector<int32_t> lane_counters_, blocks_;
  std::vector<int64_t> lane_fault_;
  int64_t needed_rows_ = 0;
  struct alignas(kRowAlign) Line {
    char bytes[kRowAlign];
  };
  std::vector<Line> scratch_rows_;  // rows of a window for every lane
  std::unique_ptr<Team> team_;
  uint64_t seq_[kNumKinds];
  WindowSelector windows_{};
  Status failure_;
  Point fault_point_ = Point::kNone;  // of the running op
  OpRecord op_record_{};
  std::vector<int64_t> arrival_ns_, waited_ns_;
  uint32_t busy_ = 0, closed_ = 0;
  bool oversubscribed_;
  CacheLocality cache_locality_;
  StreamFrom stream_from_;
  pid_t pid_;  // a forked child is not this rank
};

}  // namespace moe_rt
