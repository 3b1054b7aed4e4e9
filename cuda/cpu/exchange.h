// Frame of every op, in two halves as on a GPU (gpu/exchange.h): `begin` runs what the op sends and announces it,
// `finish` waits for every peer and runs what the op receives.
//
// `run` runs both halves in one pass of the lanes, or one of them: Pending holds everything that the second half needs
// from the first. The n-th op that begins runs in channel n mod depth.
#pragma once

#include "engine.h"
#include "waiting.h"

namespace moe_rt {

using Clock = std::chrono::steady_clock;

inline int64_t nanoseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}

// State of an op of this rank between its first step and its last.
struct Engine::Pending {
  Call call;
  Status refusal;    // ok, or why this rank refuses its own input
  const void* args;  // identifies the op
  uint64_t number;   // counts the ops of its kind
  Point fault_point;
  int window;
  Header header;
  Status status;
  OpRecord record;      // between the halves
  HostIdle idle;        // for all its waits
  bool moves = false;   // no rank that announces first has refused
  bool served = false;  // clients are served in the background
};

template <class Fn>
void Engine::run_lanes(Fn&& fn) {
  if (team_) {
    team_->run(fn);
  } else {
    fn(Solo{});
  }
}

// Injects an armed engine's fault at its point; every lane calls it. False if the op ends here.
template <class Coop>
bool Engine::fault_continues(const Coop& coop, Point point, Pending& op) {
  if (op.fault_point != point) return true;
  coop.sync();
  if (coop.rank() == 0) {
    if (config_.fault.action == Action::kCorrupt) corrupt(world(), op.call.op, op.window, op.header);
    if (!config_.fault.strike()) op.status.code = Code::kFaultInjected;
  }
  coop.sync();
  return op.status.ok();
}

// `send(coop, window, header)` writes the window and may turn the header into a refusal. False, on every lane, if the
// op ends without an announcement. After the sync no lane touches the window.
template <class Coop, class Send, class Middle>
bool Engine::begin(const Coop& coop, Pending& op, Send&& send, const Middle& middle) {
  if (!fault_continues(coop, Point::kBetweenDispatchAndCombine, op) || !fault_continues(coop, Point::kInBackward, op))
    return false;
  const bool refused = !op.refusal.ok();
  if (op.fault_point == Point::kMidPayload && !refused) send(HalfWay(coop), op.window, op.header);
  if (!fault_continues(coop, Point::kMidPayload, op)) return false;
  if (!refused) send(coop, op.window, op.header);
  streaming_store_fence();
  coop.sync();
  if (!fault_continues(coop, Point::kAfterPayload, op)) return false;
  if (coop.rank() == 0) {
    op.status = post_all(op);
    if (running_->remote_peers && op.status.ok() && op.header.status == Code::kOk) middle.fetch(op.window, op.header);
    record(&OpRecord::announced_ns, Clock::now());
  }
  return true;
}

// Serves this rank's clients as soon as the ranks that take part have announced: the ranks of its node, and the
// clients. Their announcements are passed on whatever they contain, refusals included, since no other rank sends them.
// All that is left to do if this has begun between the halves is to wait for its end.
template <class Coop, class DutyOf>
void Engine::forward(const Coop& coop, Pending& op, const DutyOf& duty_of) {
  Proxy& proxy = *running_->proxy;
  if (op.served) {
    if (coop.rank() == 0 && op.status.ok()) op.status = proxy.end(op.idle);
    return;
  }
  if (coop.rank() == 0 && op.status.ok()) {
    op.status = wait_for(op, true);
    op.moves = op.status.ok() && proxy.all_agree(op.header);
  }
  coop.sync();
  const Status s = op.moves ? proxy.serve(coop, duty_of(op.window), scratch_row(coop.rank()), op.idle) : Status{};
  if (!fault_continues(coop, Point::kBeforePassingOn, op)) return;
  coop.sync();
  if (coop.rank() != 0 || !op.status.ok()) return;
  op.status = s;
  if (s.ok()) proxy.pass_on(op.header);
}

// `receive(coop, op, status)` reads peers' windows and may report a failure; it does not run if the wait
// failed.
template <class Coop, class Receive, class Middle>
void Engine::finish(const Coop& coop, Pending& op, Receive&& receive, const Middle& middle) {
  if (running_->proxy) forward(coop, op, middle.duty_of);
  if (coop.rank() == 0) {
    if (op.status.ok()) op.status = wait_all(op);
    if (running_->remote_peers && op.status.ok() && kind_of(op.call.op) == Kind::kDispatch) {
      op.idle.resume();
      op.status = running_->remote_peers->end(op.idle);
    }
    if (running_->remote) config_.network->end_driving();  // lanes may compute for a long time now
    // A wait that failed has no end before the op has. Otherwise: 1. this rank poisons its peers, 2. a peer that fails
    // by that reports on it, and finds neither a wait nor a failure, 3. this rank records the end of the op.
    if (op.status.ok() || is_refusal(op.status.code)) record(&OpRecord::arrived_ns, Clock::now());
    if (op.status.ok() && op.call.op == Op::kDispatch && cache_locality_.look(world(), op.window)) set_stream_from();
  }
  coop.sync();
  if (!op.status.ok()) return;
  if (op.fault_point == Point::kMidRead) {
    Status half;  // errors found in half of the rows do not count
    receive(HalfWay(coop), std::as_const(op), half);
  }
  if (!fault_continues(coop, Point::kMidRead, op)) return;
  receive(coop, std::as_const(op), op.status);
  streaming_store_fence();
}

// Assigns the op's sequence number and window in its channel, and records its start.
inline Engine::Pending Engine::open(const void* args, const Call& call, const Status& refusal) {
  const Kind kind = kind_of(call.op);
  Header header = world().header(++running_->seq[static_cast<int>(kind)], call);
  if (!refusal.ok()) header.refuse(refusal.code, refusal.got, refusal.expected);
  const uint64_t number = ++last_[static_cast<int>(kind)];
  op_record_ = {.number = ++num_ops_,
                .seq = number,
                .op = call.op,
                .tag = call.tag,
                .num_tokens = call.num_tokens,
                .handle_seq = call.handle_seq};
  record(&OpRecord::start_ns, Clock::now());
  const Point fault_point = config_.fault.take(call.op, last_[0] + last_[1]);
  return {.call = call,
          .refusal = refusal,
          .args = args,
          .number = number,
          .fault_point = fault_point,
          .window = running_->windows.take(kind),
          .header = header,
          .status = {},
          .record = {},
          .idle = idle(call.op, number)};
}

// Afterwards send buffers may be reused, and the op's signals have arrived before those of the next op. A peer that is
// lost by now has announced this op, so the next op reports it.
inline void Engine::settle(Pending& op) {
  RemoteNetwork& remote = *running_->remote;
  remote.stop();
  if (op.status.ok() || is_refusal(op.status.code)) {
    config_.network->begin_driving();
    op.idle.resume();
    const Status s = remote.settle(remote.ranks(), Phase::kReduce, op.idle);
    if (!s.ok() && s.code != Code::kPeerDead) op.status = s;
  }
  config_.network->end_driving();
}

// Calls fn with the link by which roles reach their peers in an op that uses this window.
template <class Fn>
void Engine::with_link(int window, Fn&& fn) const {
  if (running_->proxy) {
    fn(NodeLink{window});
  } else if (running_->remote_peers) {
    fn(RemoteLink{*running_->remote_peers, window});
  } else {
    fn(MappedLink{});
  }
}

// Returns the channel of the op that these arguments began, or of the next op; nullptr if that channel is not free.
inline Engine::Channel* Engine::find_channel(const void* args, Half half) {
  if (half != Half::kSecond) {
    Channel& next = channels_[num_ops_ % channels_.size()];
    return next.pending ? nullptr : &next;
  }
  for (Channel& channel : channels_) {
    if (channel.pending && channel.pending->args == args) return &channel;
  }
  return nullptr;
}

// Ends the exclusive use of the engine. If another thread has closed it meanwhile, the segments may be unmapped from
// now on.
inline void Engine::let_go() {
  if (load_acquire(closed_)) stop_remote();
  store_release(busy_, 0u);
}

// Takes the engine for one call: a whole op in one pass of the lanes, or one half of it. Every failure ends the op.
template <class Send, class Receive, class Middle>
Status Engine::run(const void* args, const Call& call, Half half, Send&& send, Receive&& receive, const Status& refusal,
                   const Middle& middle) {
  if (exchange_acquire(busy_, 1u)) {
    if (load_acquire(closed_)) return health();
    return {.code = Code::kConcurrentUse, .op = call.op};
  }
  Status status = health();
  if (status.code == Code::kPoisoned) status = fail(status);  // peers may wait for this rank and not know of the
                                                              // failure
  if (status.ok() && !(running_ = find_channel(args, half))) {
    status = {.code = Code::kConcurrentUse, .op = call.op};
  } else if (status.ok()) {
    std::unique_ptr<Pending>& pending = running_->pending;
    Pending op = pending ? *std::exchange(pending, nullptr) : open(args, call, refusal);
    const bool remote = running_->remote != nullptr;
    if (half == Half::kSecond) {
      op_record_ = op.record;
      if (remote) config_.network->begin_driving();
      op.served = running_->proxy && !running_->proxy->take_back();
    }
    run_lanes([&](const auto& coop) {
      if (half != Half::kSecond && !begin(coop, op, send, middle)) return;
      if (half != Half::kFirst) finish(coop, op, receive, middle);
    });
    if (half == Half::kFirst && op.status.ok()) {
      if (running_->proxy && op.fault_point != Point::kBeforePassingOn) {
        running_->proxy->take_on(middle.duty_of(op.window), op.header);
        config_.network->wake();
      }
      if (remote) config_.network->end_driving();
      op.record = op_record_;
      pending = std::make_unique<Pending>(op);
      let_go();
      return {};
    }
    if (remote) settle(op);
    op.status.op = call.op;
    op.status.seq = op.number;
    status = fail(op.status);
    op_record_.code = status.code;
    record(&OpRecord::end_ns, Clock::now());
  }
  let_go();
  return status;
}

}  // namespace moe_rt
