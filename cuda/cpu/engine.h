// CPU engine of one rank: owns its sequence numbers and scratch, and runs each op as one call over mapped segments.
#pragma once

#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../net/remote_peers.h"
#include "../protocol/core/calls.h"
#include "../protocol/core/window_selector.h"
#include "../protocol/flat/combine.h"
#include "../protocol/flat/dispatch.h"
#include "../protocol/flat/routing.h"
#include "cache_locality.h"
#include "fault.h"
#include "proxy.h"
#include "rows.h"
#include "team.h"
#include "world_tables.h"

namespace moe_rt {

struct EngineConfig {
  Shape shape;
  rows::Elem elem;
  int rank;
  uint64_t config_hash;
  std::vector<int32_t> expert_rank;  // [E]
  std::vector<int32_t> node_of{};    // [R] node of each rank if rows go in two levels, else empty
  std::vector<uint64_t>
      segments;              // [R] addresses, 0 if not mapped; each Layout::bytes long, zero-filled before first use
  std::vector<int> watches;  // [R] /proc/<pid>/stat descriptors, or empty; see HostIdle::Watched
  double timeout_s;
  Codec dispatch_codec, combine_codec;  // codecs of forward ops; gradients travel raw
  bool drop_overflow;                   // false: all ranks refuse an overflow
  int num_lanes;
  std::string isa;
  uint64_t first_seq = 1;  // first sequence number of both kinds; mailboxes hold the one before: tests start close to a
                           // wrap
  Fault fault{};           // set by tests only
  int64_t cache_bytes = int64_t{32} << 20;              // bytes of the last-level cache
  double near_ns = tuning::kNearNs;                     // maximum latency of a line from a shared cache, in ns
  std::optional<tuning::StreamShares> stream_shares{};  // nullopt: those of the instruction set
  int num_cores = static_cast<int>(std::thread::hardware_concurrency());  // cores shared by all ranks
  bool (*interrupted)() = nullptr;     // called a few times a second in long waits; true ends the op, and the group
  std::shared_ptr<Network> network{};  // network to unmapped peers
};

// Part of an op that a call runs. As many ops as the buffer's depth may be between their halves. In two levels all ranks
// must end them in the order in which they began: a proxy without a thread that serves peers passes an op on when it ends
// it.
enum class Half { kBoth, kFirst, kSecond };

class Engine {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Each call returns when this rank's part is done. `tag` names the layer; it must be identical on all ranks. The first
  // half announces the op and waits for no peer; the second half takes the same object as arguments. A first half
  // returns kInvalidInput, and announces nothing, if plans or rows are wrong: the caller refuses the op.
  Status dispatch(const DispatchArgs& args, uint32_t tag, Half half = Half::kBoth);
  Status combine(const CombineArgs& args, uint32_t tag, Half half = Half::kBoth);  // and dispatch backward
  Status combine_backward(const CombineBackwardArgs& args, uint32_t tag, Half half = Half::kBoth);

  // Takes part in an op only to announce that this rank refuses it, so that every rank raises and none waits.
  Status refuse(Op op, Code code, int64_t got, int64_t expected, uint32_t tag);

  // Token window that the next op takes if it is a dispatch: 2 * channel + window.
  int next_token_window() const {
    const Channel& next = next_channel();
    return 2 * int(next.world.layout.channel) + next.windows.next(Kind::kDispatch);
  }

  // Rows that this rank would have received; valid after kCapacityOverflow.
  int64_t needed_rows() const { return needed_rows_; }

  // Records why this rank is about to leave, for its peers. Idempotent: the first words stay.
  void leave_words(std::string_view text);
  // Last words of an unmapped peer; empty if they cannot be fetched.
  std::string remote_last_words(int peer) {
    return channels_[0].remote ? channels_[0].remote->last_words(world_, peer) : std::string();
  }
  // Announces to every peer that this rank cannot continue; their waits end. Idempotent: the first cause stays.
  void poison(Code code, int peer);
  // The failure that ended this group, if any; never blocks.
  Status health() const;
  // Announces to peers that this rank has closed, and refuses further ops; waits for no peer. Idempotent. True if the
  // segments may be unmapped: not while another thread is inside an op.
  bool close();

  // Record of the current or last op: times when lane 0 began it, announced, had all peers' signals, and ended.
  const OpRecord& op_record() const { return op_record_; }
  // Bytes per op from which on this rank stores rows past the caches (rows.h), by kind of row.
  struct StreamFrom {
    int64_t published, received, pushed, combined;
  };
  const StreamFrom& stream_from() const { return stream_from_; }
  // [R] time in ns from the start of the wait until each peer's signal was seen, in rank order.
  const std::vector<int64_t>& arrival_ns() const { return arrival_ns_; }
  // [R] total time in ns that this rank has waited for each peer; peers are awaited in rank order.
  std::vector<int64_t> waited_ns() const;
  const std::vector<double>& line_latency_ns() const { return cache_locality_.line_latency_ns(); }

 private:
  struct Pending;
  struct Channel;
  // Network steps between the two halves of an op; most ops have none.
  static constexpr auto kNothing = [](auto&&...) { return Status{}; };
  static constexpr auto kNoDuty = [](int) { return Duty{}; };
  template <class Fetch = decltype(kNothing), class DutyOf = decltype(kNoDuty)>
  struct Between {
    Fetch fetch{};     // (window, header), by one lane: starts to fetch data of unmapped peers
    DutyOf duty_of{};  // (window): returns what this rank does for its clients as their proxy
  };
  template <class Fetch, class DutyOf>
  static Between<Fetch, DutyOf> between(Fetch fetch, DutyOf duty_of) {
    return {fetch, duty_of};
  }
  template <class Send, class Receive, class Middle = Between<>>
  Status run(const void* args, const Call& call, Half half, Send&& send, Receive&& receive, const Status& refusal = {},
             const Middle& middle = {});
  Channel* find_channel(const void* args, Half half);
  Pending open(const void* args, const Call& call, const Status& refusal);
  template <class Fn>
  void run_lanes(Fn&& fn);
  template <class Coop, class Send, class Middle>
  bool begin(const Coop& coop, Pending& op, Send&& send, const Middle& middle);
  template <class Coop, class Receive, class Middle>
  void finish(const Coop& coop, Pending& op, Receive&& receive, const Middle& middle);
  template <class Coop, class DutyOf>
  void forward(const Coop& coop, Pending& op, const DutyOf& duty_of);
  template <class Coop>
  bool fault_continues(const Coop& coop, Point point, Pending& op);
  Status post_all(Pending& op);
  Status wait_for(Pending& op, bool direct_only);
  Status wait_all(Pending& op);
  Status judge_headers(const Header& ours) const;
  HostIdle idle(Op op, uint64_t number) const;
  void settle(Pending& op);
  uint64_t num_announced(Kind kind, int peer) const;
  template <class Fn>
  void with_link(int window, Fn&& fn) const;
  Status fail(Status status);
  void let_go();
  void reach_remote(Channel& channel);
  void stop_remote();
  void set_stream_from();
  void record(int64_t OpRecord::* step, std::chrono::steady_clock::time_point when);
  // Row primitives of an op that writes n rows and streams from `stream_from` bytes on.
  template <class Acc>
  rows::HostRows<Acc> row_ops(int64_t n, int64_t stream_from, Codec codec) const;
  // Row primitives for rows with scales, which a dispatch publishes or delivers.
  rows::HostScaledRows scaled_rows(const ScaledArgs& args, int64_t n, int64_t stream_from) const;
  static constexpr int kScratchRows = 3;  // scratch rows per lane
  char* scratch_row(int lane, int which = 0) {
    return scratch_rows_[(lane * kScratchRows + which) * world_.shape.row_bytes() / sizeof(Line)].bytes;
  }

  template <class Args>
  Status judge(Op op, const RecvPlan& plan, const int32_t* send_plan, const Args& args) const;
  bool out_overlaps_rows(const CombineArgs& args) const;
  template <class Acc>
  struct DispatchSteps;
  template <class Acc>
  Status typed_dispatch(const DispatchArgs& args, uint32_t tag, Half half);
  template <class Acc>
  Status typed_combine(const CombineArgs& args, uint32_t tag, Half half);
  template <class Acc>
  Status combine_entries(const CombineArgs& args, const Returned<Acc>& in, uint32_t tag, Half half);
  template <class Acc>
  Status typed_combine_backward(const CombineBackwardArgs& args, uint32_t tag, Half half);

  // World of the running op; other members use that of the first channel, which differs in its layout only.
  const World& world() const { return running_->world; }
  const Channel& next_channel() const { return channels_[num_ops_ % channels_.size()]; }

  // State that the ops of one channel share. At most one of them is between its halves (docs/protocol.md, "Depth").
  struct Channel {
    World world{};
    std::shared_ptr<RemoteNetwork> remote{};  // set if some peer is not mapped: one of the next two
    RemotePeers* remote_peers = nullptr;
    Proxy* proxy = nullptr;
    uint64_t seq[kNumKinds]{};
    WindowSelector windows{};
    std::unique_ptr<Pending> pending{};  // the op whose first half has run
  };

  EngineConfig config_;
  RuntimeDims dims_;
  const rows::Table* table_;
  PlacementTables placement_;
  NodeTables nodes_;
  std::vector<char*> base_;
  std::vector<Channel> channels_;
  const World& world_;          // of the first channel
  Channel* running_ = nullptr;  // channel of the running op
  int num_mapped_;
  std::vector<int32_t> lane_counters_, blocks_;
  std::vector<int64_t> lane_fault_;
  int64_t needed_rows_ = 0;
  struct alignas(kRowAlign) Line {
    char bytes[kRowAlign];
  };
  std::vector<Line> scratch_rows_;  // window rows for every lane
  std::unique_ptr<Team> team_;
  uint64_t num_ops_ = 0, last_[kNumKinds];  // ops begun, and number of the last one of each kind
  Status failure_;
  OpRecord op_record_{};
  std::vector<int64_t> arrival_ns_, waited_ns_;
  uint32_t busy_ = 0, closed_ = 0;
  bool oversubscribed_;
  CacheLocality cache_locality_;
  StreamFrom stream_from_;
  pid_t pid_;  // a forked child is not this rank
};

}  // namespace moe_rt
