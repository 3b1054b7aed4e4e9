// How a CPU rank waits for a peer: spin, then yield, then doze, always looking out for poison, death, the deadline and
// signals to this process.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "../protocol/core/layout.h"
#include "network.h"
#include "process.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_rt {

class HostIdle {
 public:
  using Clock = std::chrono::steady_clock;

  // `seq` holds this rank's own numbers per kind. `interrupted` may be null, or says whether a signal ends this wait.
  // `network`, where some peer is reached through one, is driven from here; else nullptr.
  HostIdle(const World& world, Op op, const uint64_t* seq, double timeout_s, bool oversubscribed, bool (*interrupted)(),
           Network* network = nullptr)
      : world_(world),
        op_(op),
        kind_(kind_of(op)),
        seq_(seq),
        timeout_s_(timeout_s),
        interrupted_(interrupted),
        network_(network),
        looked_(Clock::now()),
        look_at_process_(looked_ + kLookAtProcessEvery),
        look_for_signals_(looked_ + kLookForSignalsEvery),
        spins_(oversubscribed ? kSpinsOversubscribed : kSpins) {}

  // `process` is an open /proc/<pid>/stat; negative (ranks that are threads): never looked at.
  void watch(int peer, int process) { peer_ = peer, process_ = process; }

  Code pause(const Mailbox& mailbox, uint64_t seq) { return pause(&mailbox, seq); }
  // Between looks at what the network has to finish for op `seq`, of which no peer announces anything.
  Code pause(uint64_t seq) { return pause(nullptr, seq); }

 private:
  Code pause(const Mailbox* mailbox, uint64_t seq) {
    if (network_) network_->drive();
    if (load_relaxed(world_.poison(world_.rank)) != 0) return Code::kPoisoned;
    if (++pauses_ <= spins_) {
      relax();
      return Code::kOk;
    }
    if (!dozing_ && pauses_ % kLookEvery != 0) {
      sched_yield();
      return Code::kOk;
    }
    const Code code = look_around(mailbox, seq);
    if (dozing_ && code == Code::kOk) {
      const timespec nap{0, kNapNs};
      nanosleep(&nap, nullptr);
    }
    return code;
  }

  // About 5 us of spinning covers a peer that is already in the op; yielding covers one that shares our core; dozing
  // leaves the core to a peer that computes for long, at a cost that is small against such a wait.
  static constexpr int kSpins = 256, kSpinsOversubscribed = 8, kLookEvery = 64;
  static constexpr std::chrono::milliseconds kDozeAfter{5};
  static constexpr long kNapNs = 50'000;
  static constexpr std::chrono::microseconds kLookAtProcessEvery{500};
  static constexpr std::chrono::milliseconds kLookForSignalsEvery{100};
  // Looks are further apart than this if this process did not run: stopped, frozen, suspended. That is no waiting: when
  // a whole job is thawed, its ranks must not blame each other for the time in which none could do anything.
  static constexpr Clock::duration kLongestGap = std::chrono::milliseconds(100);

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  Code look_around(const Mailbox* mailbox, uint64_t seq) {
    const Clock::time_point now = Clock::now();
    waited_ += std::min(now - looked_, kLongestGap);
    looked_ = now;
    dozing_ = waited_ > kDozeAfter;
    if (mailbox) {
      const Kind other = kind_ == Kind::kDispatch ? Kind::kCombine : Kind::kDispatch;
      if (closed_before(*mailbox, seq)) return Code::kPeerClosed;
      if (out_of_order(*mailbox, seq, world_.mailbox(world_.rank, other, peer_), seq_[static_cast<int>(other)])) {
        return Code::kCallOrderMismatch;
      }
      if (network_ && network_->lost(peer_)) return Code::kPeerDead;
    }
    if (is_due(look_at_process_, kLookAtProcessEvery) && has_ended(process_)) return Code::kPeerDead;
    if (interrupted_ && is_due(look_for_signals_, kLookForSignalsEvery) && interrupted_()) return Code::kInterrupted;
    const double waited = std::chrono::duration<double>(waited_).count();  // timeout_s may be more than a clock counts
    if (waited > timeout_s_) return Code::kPeerTimeout;
    if (waited > timeout_s_ / 10 && !std::exchange(warned_, true)) warn(seq);
    return Code::kOk;
  }

  bool is_due(Clock::time_point& when, Clock::duration every) const {
    if (looked_ < when) return false;
    when = looked_ + every;
    return true;
  }

  // Once per op, and straight to stderr: whoever looks at a job that hangs must see it, and Python may never run again.
  void warn(uint64_t seq) const {
    constexpr const char* kNames[] = {"no op", "dispatch", "combine", "dispatch_backward", "combine_backward"};
    std::fprintf(stderr, "moe_rt: %s #%llu on rank %d has waited %.3g s for rank %d; PeerTimeout after %g s\n",
                 kNames[static_cast<int>(op_)], static_cast<unsigned long long>(seq), world_.rank, timeout_s_ / 10,
                 peer_, timeout_s_);
  }

  const World& world_;
  Op op_;
  Kind kind_;
  const uint64_t* seq_;
  double timeout_s_;
  bool (*interrupted_)();
  Network* network_;
  Clock::time_point looked_, look_at_process_, look_for_signals_;
  Clock::duration waited_{0};
  int spins_, pauses_ = 0, peer_ = -1, process_ = -1;
  bool dozing_ = false, warned_ = false;
};

}  // namespace moe_rt
