// Wait of a CPU rank for a peer: spin, then yield, then doze, while checking for poison, death, the deadline and
// signals to this process.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "../net/network.h"
#include "../protocol/core/layout.h"
#include "../protocol/core/tuning.h"
#include "process.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_rt {

class HostIdle {
 public:
  using Clock = std::chrono::steady_clock;

  // `number` is the op's, for a message; `seq` holds this rank's sequence numbers per kind. `interrupted` may be null;
  // it returns true if a signal ends this wait. `network` is driven by this wait if some peer is reached through one;
  // else nullptr.
  HostIdle(const World& world, Op op, uint64_t number, const uint64_t* seq, double timeout_s, bool oversubscribed,
           bool (*interrupted)(), Network* network = nullptr)
      : world_(world),
        op_(op),
        number_(number),
        kind_(kind_of(op)),
        seq_(seq),
        timeout_s_(timeout_s),
        interrupted_(interrupted),
        network_(network),
        looked_(Clock::now()),
        look_at_process_(looked_ + kLookAtProcessEvery),
        look_for_signals_(looked_ + kLookForSignalsEvery),
        spins_(oversubscribed ? tuning::kSpinsOversubscribed : tuning::kSpins) {}

  // Peer that is waited for.
  struct Watched {
    int peer;
    int announcer;           // the peer, or the proxy that passes its announcements on
    int process = -1;        // the announcer's open /proc/<pid>/stat; negative (ranks are threads): never read
    bool passed_on = false;  // a proxy announces it after other waits
    bool in_order = true;    // the peer announces both kinds itself, so that their order is meaningful
  };
  void watch(const Watched& watched) { watched_ = watched; }

  // Starts another wait of the op after other work. All its waits together end after timeout_s; waits for a proxy a
  // quarter later, so that a rank that waits for the source directly reports first.
  void resume(Clock::time_point now = Clock::now()) {
    looked_ = now;
    pauses_ = 0, this_wait_ = {}, dozing_ = false;
  }

  Code pause(const Mailbox& mailbox, uint64_t) { return pause(&mailbox); }
  // Pause between polls of network requests, which no peer announces.
  Code pause() { return pause(nullptr); }

 private:
  Code pause(const Mailbox* mailbox) {
    if (network_) network_->drive();
    if (const uint64_t word = load_relaxed(world_.poison(world_.rank)); word != 0) {
      const double waited = std::chrono::duration<double>(waited_ + gap_until(Clock::now())).count();
      return blames_who_waits(word, world_.rank, waited, timeout_s_) ? Code::kPeerTimeout : Code::kPoisoned;
    }
    if (++pauses_ <= spins_) {
      relax();
      return Code::kOk;
    }
    if (!dozing_ && pauses_ % tuning::kLookEvery != 0) {
      sched_yield();
      return Code::kOk;
    }
    const Code code = look_around(mailbox);
    if (dozing_ && code == Code::kOk) {
      const timespec nap{0, tuning::kNapNs};
      nanosleep(&nap, nullptr);
    }
    return code;
  }

  // Spinning covers a peer that is already in the op, yielding a peer that shares this core. Dozing leaves the core to a
  // peer that computes for long.
  static constexpr std::chrono::milliseconds kDozeAfter{tuning::kDozeAfterMs};
  static constexpr std::chrono::microseconds kLookAtProcessEvery{tuning::kLookAtProcessUs};
  static constexpr std::chrono::milliseconds kLookForSignalsEvery{tuning::kLookForSignalsMs};
  // Checks are further apart than this only if this process did not run: stopped, frozen or suspended. That time is not
  // waiting: when a whole job is thawed, its ranks must not blame each other for it.
  static constexpr Clock::duration kLongestGap = std::chrono::milliseconds(100);
  static constexpr double kPatience = 1.25;

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  Clock::duration gap_until(Clock::time_point now) const { return std::min(now - looked_, kLongestGap); }

  Code look_around(const Mailbox* mailbox) {
    const Clock::time_point now = Clock::now();
    const Clock::duration gap = gap_until(now);
    waited_ += gap, this_wait_ += gap;
    looked_ = now;
    dozing_ = this_wait_ > kDozeAfter;
    if (mailbox) {
      const Kind other = kind_ == Kind::kDispatch ? Kind::kCombine : Kind::kDispatch;
      const Mailbox& others = world_.mailbox(world_.rank, other, watched_.peer);
      // Check the announcer, not the peer: a peer may have closed while its proxy still has to pass its announcements
      // on.
      const Mailbox& announcers = world_.mailbox(world_.rank, kind_, watched_.announcer);
      if (closed_before(announcers, *mailbox, seq_of(kind_))) return Code::kPeerClosed;
      if (watched_.in_order && out_of_order(*mailbox, seq_of(kind_), others, seq_of(other))) {
        return Code::kCallOrderMismatch;
      }
      if (network_ && network_->lost(watched_.announcer)) return Code::kPeerDead;
    }
    if (is_due(look_at_process_, kLookAtProcessEvery) && has_ended(watched_.process)) return Code::kPeerDead;
    const double waited = std::chrono::duration<double>(waited_).count();  // timeout_s may exceed the clock's range
    const bool late = waited > timeout_s_ * (watched_.passed_on ? kPatience : 1);
    // An interrupt that arrived before the timeout takes precedence over PeerTimeout.
    if (interrupted_ && (is_due(look_for_signals_, kLookForSignalsEvery) || late) && interrupted_()) {
      return Code::kInterrupted;
    }
    if (late) return Code::kPeerTimeout;
    if (waited > timeout_s_ / 10 && !std::exchange(warned_, true)) warn();
    return Code::kOk;
  }
  uint64_t seq_of(Kind kind) const { return seq_[static_cast<int>(kind)]; }

  bool is_due(Clock::time_point& when, Clock::duration every) const {
    if (looked_ < when) return false;
    when = looked_ + every;
    return true;
  }

  // Warns once per op, directly on stderr: it must be visible when a job hangs, and Python may never run again.
  void warn() const {
    constexpr const char* kNames[] = {"no op", "dispatch", "combine", "dispatch_backward", "combine_backward"};
    std::fprintf(stderr, "moe_rt: %s #%llu on rank %d has waited %.3g s for rank %d; PeerTimeout after %g s\n",
                 kNames[static_cast<int>(op_)], static_cast<unsigned long long>(number_), world_.rank, timeout_s_ / 10,
                 watched_.peer, timeout_s_);
  }

  const World& world_;
  Op op_;
  uint64_t number_;
  Kind kind_;
  const uint64_t* seq_;
  double timeout_s_;
  bool (*interrupted_)();
  Network* network_;
  Clock::time_point looked_, look_at_process_, look_for_signals_;
  Clock::duration waited_{0}, this_wait_{0};  // in this op so far, and since the last resume
  Watched watched_{-1, -1};
  int spins_, pauses_ = 0;
  bool dozing_ = false, warned_ = false;
};

}  // namespace moe_rt
