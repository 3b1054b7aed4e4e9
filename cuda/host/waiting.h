// How a CPU rank waits for a peer: spin, then yield, then doze, always looking out for poison, death and the deadline.
#pragma once

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <chrono>

#include "../protocol/layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_rt {

class HostIdle {
 public:
  using Clock = std::chrono::steady_clock;

  // `seq` holds this rank's own numbers per kind. A negative pidfd (ranks that are threads) is never looked at.
  HostIdle(const World& world, Kind kind, const uint64_t* seq, double timeout_s, bool oversubscribed)
      : world_(world),
        kind_(kind),
        seq_(seq),
        start_(Clock::now()),
        deadline_(start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))),
        spins_(oversubscribed ? kSpinsOversubscribed : kSpins) {}

  void watch(int peer, int pidfd) { peer_ = peer, pidfd_ = pidfd; }

  Code pause(const Mailbox& mailbox, uint64_t seq) {
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
    if (dozing_) {
      const timespec nap{0, kNapNs};
      nanosleep(&nap, nullptr);
    }
    return code;
  }

 private:
  // About 5 us of spinning covers a peer that is already in the op; yielding covers one that shares our core; dozing
  // leaves the core to a peer that computes for long, at a cost that is small against such a wait.
  static constexpr int kSpins = 256, kSpinsOversubscribed = 8, kLookEvery = 64;
  static constexpr std::chrono::milliseconds kDozeAfter{5};
  static constexpr long kNapNs = 50'000;

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  Code look_around(const Mailbox& mailbox, uint64_t seq) {
    const Kind other = kind_ == Kind::kDispatch ? Kind::kCombine : Kind::kDispatch;
    if (said_goodbye(mailbox, seq)) return Code::kPeerClosed;
    if (out_of_order(mailbox, seq, world_.mailbox(world_.rank, other, peer_), seq_[static_cast<int>(other)])) {
      return Code::kCallOrderMismatch;
    }
    // A peer may have announced just before it died: its last signal counts.
    if (is_dead() && !reached(load_acquire(mailbox.signal), seq)) return Code::kPeerDead;
    const Clock::time_point now = Clock::now();
    dozing_ = now - start_ > kDozeAfter;
    return now > deadline_ ? Code::kPeerTimeout : Code::kOk;
  }

  bool is_dead() const {
    if (pidfd_ < 0) return false;
    pollfd p{pidfd_, POLLIN, 0};
    return poll(&p, 1, 0) == 1;
  }

  const World& world_;
  Kind kind_;
  const uint64_t* seq_;
  Clock::time_point start_, deadline_;
  int spins_, pauses_ = 0, peer_ = -1, pidfd_ = -1;
  bool dozing_ = false;
};

}  // namespace moe_rt
