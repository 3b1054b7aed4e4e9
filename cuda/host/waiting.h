// How a CPU rank waits for a peer: spin, then yield, then doze, always looking out for poison, death and the deadline.
#pragma once

#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string_view>

#include "../protocol/layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_rt {

class HostIdle {
 public:
  using Clock = std::chrono::steady_clock;

  // `seq` holds this rank's own numbers per kind.
  HostIdle(const World& world, Op op, const uint64_t* seq, double timeout_s, bool oversubscribed)
      : world_(world),
        op_(op),
        kind_(kind_of(op)),
        seq_(seq),
        timeout_s_(timeout_s),
        start_(Clock::now()),
        warn_at_(start_ + seconds(timeout_s / 10)),
        deadline_(start_ + seconds(timeout_s)),
        spins_(oversubscribed ? kSpinsOversubscribed : kSpins) {}

  // `process` is a pidfd or an open /proc/<pid>/stat; negative (ranks that are threads): never looked at.
  void watch(int peer, int process) { peer_ = peer, process_ = process; }

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

  static Clock::duration seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
  }

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
    if (now > deadline_) return Code::kPeerTimeout;
    if (now > warn_at_) warn(seq);
    return Code::kOk;
  }

  // Once per op, and straight to stderr: whoever looks at a job that hangs must see it, and Python may never run again.
  void warn(uint64_t seq) {
    constexpr const char* kNames[] = {"no op", "dispatch", "combine", "dispatch_backward", "combine_backward"};
    std::fprintf(stderr, "moe_rt: %s #%llu on rank %d has waited %.3g s for rank %d; PeerTimeout after %g s\n",
                 kNames[static_cast<int>(op_)], static_cast<unsigned long long>(seq), world_.rank, timeout_s_ / 10,
                 peer_, timeout_s_);
    warn_at_ = deadline_;
  }

  // A pidfd is readable once the process has ended. /proc/<pid>/stat always is: it says whether the process is a
  // zombie, and after that it, like a pidfd, gives no bytes.
  bool is_dead() const {
    if (process_ < 0) return false;
    pollfd p{process_, POLLIN, 0};
    if (poll(&p, 1, 0) != 1) return false;
    char stat[512];
    const ssize_t bytes = pread(process_, stat, sizeof(stat), 0);
    if (bytes <= 0) return true;
    const std::string_view text(stat, bytes);
    const size_t state = text.rfind(')') + 2;  // the name before it may hold anything
    return state < text.size() && (text[state] == 'Z' || text[state] == 'X');
  }

  const World& world_;
  Op op_;
  Kind kind_;
  const uint64_t* seq_;
  double timeout_s_;
  Clock::time_point start_, warn_at_, deadline_;
  int spins_, pauses_ = 0, peer_ = -1, process_ = -1;
  bool dozing_ = false;
};

}  // namespace moe_rt
