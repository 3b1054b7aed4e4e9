// The frame around every op: take the engine, run `before` on all lanes, announce, wait for every peer, run `after`.
#pragma once

#include "engine.h"
#include "waiting.h"

namespace moe_rt {

using Clock = std::chrono::steady_clock;

inline int64_t nanoseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}

struct Engine::Call {
  Op op;
  uint32_t tag;
  uint64_t handle_seq;  // of the dispatch whose handle is reused; 0 for dispatch itself
  int64_t num_tokens;
  Status refusal;  // ok, or why this rank refuses its own input
};

template <class Fn>
void Engine::run_lanes(Fn&& fn) {
  if (team_) {
    team_->run(fn);
  } else {
    fn(Solo{});
  }
}

// Where an armed engine's fault strikes; every lane calls it. False when the op ends here.
template <class Coop>
bool Engine::goes_on(const Coop& coop, Point point, const Call& call, Header& header, Status& status) {
  if (fault_point_ != point) return true;
  coop.sync();
  if (coop.rank() == 0) {
    if (config_.fault.action == Action::kCorrupt) corrupt(world_, call.op, windows_.taken(kind_of(call.op)), header);
    if (!config_.fault.strike()) status.code = Code::kFaultInjected;
  }
  coop.sync();
  return status.ok();
}

// `before(coop, window, header)` writes the window and may turn the header into a refusal; `after(coop, seq, window,
// status)` reads peers' windows and may report a failure. Both end in step: after the last sync no lane touches a
// window.
template <class Before, class After>
Status Engine::exchange(const Call& call, Before&& before, After&& after) {
  if (exchange_acquire(busy_, 1u)) {
    if (load_acquire(closed_)) return health();
    return {Code::kConcurrentUse, call.op, Phase::kNone, -1, 0, 0, 0};
  }
  Status status = health();
  if (status.ok()) {
    const Kind kind = kind_of(call.op);
    const uint64_t seq = ++seq_[static_cast<int>(kind)];
    const int window = windows_.take(kind);
    const auto num_tokens = static_cast<int32_t>(call.num_tokens);
    op_record_ = {op_record_.number + 1, seq, call.op, Code::kOk, call.tag, num_tokens, 0, 0, 0, 0, 0, -1,
                  call.handle_seq};
    record(&OpRecord::start_ns, Clock::now());
    Header header{seq,
                  world_.config,
                  call_word(call.op, call.tag, call.handle_seq),
                  call.refusal.code,
                  num_tokens,
                  call.refusal.got,
                  call.refusal.expected};
    fault_point_ = config_.fault.take(call.op, seq_[0] + seq_[1]);
    run_lanes([&](const auto& coop) {
      const auto reaches = [&](Point point) { return goes_on(coop, point, call, header, status); };
      if (!reaches(Point::kBetweenDispatchAndCombine) || !reaches(Point::kInBackward)) return;
      if (fault_point_ == Point::kMidPayload && call.refusal.ok()) before(HalfWay(coop), window, header);
      if (!reaches(Point::kMidPayload)) return;
      if (call.refusal.ok()) before(coop, window, header);
      streaming_store_fence();
      coop.sync();
      if (!reaches(Point::kAfterPayload)) return;
      if (coop.rank() == 0) {
        status = post_all(call.op, header);
        record(&OpRecord::announced_ns, Clock::now());
        if (status.ok()) status = wait_all(call.op, header);
        record(&OpRecord::heard_ns, Clock::now());
        if (status.ok() && call.op == Op::kDispatch && cache_locality_.look(world_, window)) set_stream_from();
      }
      coop.sync();
      if (!status.ok()) return;
      if (fault_point_ == Point::kMidRead) after(HalfWay(coop), seq, window, status);
      if (!reaches(Point::kMidRead)) return;
      after(coop, seq, window, status);
      streaming_store_fence();
    });
    status.op = call.op;
    status.seq = seq;
    status = fail(status);
    op_record_.code = status.code;
    record(&OpRecord::end_ns, Clock::now());
  }
  store_release(busy_, 0u);
  return status;
}

}  // namespace moe_rt
