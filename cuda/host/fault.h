// Faults on purpose, for tests: at one point of one op this rank dies, stops, sleeps, fails, or publishes nonsense.
//
// An engine that is not armed pays a comparison at each point, none of which is in a loop over rows.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "../protocol/core/coop.h"
#include "../protocol/core/layout.h"

namespace moe_rt {

// Where; values are those of moe_rt/faults.py, which reaches the points outside of ops itself.
enum class Point : int32_t {
  kNone = 0,
  kPreRendezvous = 1,
  kPostRendezvous = 2,
  kMidPayload = 3,  // half of the rows are written
  kAfterPayload = 4,
  kAfterSomeFlags = 5,  // one peer has not been told
  kAfterAllFlags = 6,
  kMidRead = 7,  // half of the rows are read
  kBetweenDispatchAndCombine = 8,
  kInBackward = 9,
  kInDestroy = 10,
  kBeforePassingOn = 11,  // what ranks of other nodes sent or are sent has been moved, and nobody been told of it
};

enum class Action : int32_t { kNone = 0, kKill = 1, kStop = 2, kSleep = 3, kRaise = 4, kCorrupt = 5 };

struct Fault {
  Point at = Point::kNone;
  Action action = Action::kNone;
  uint64_t op = 0;  // the first op from this number on, counted from 1, that has the point
  double seconds = 0;

  // The point at which to strike in the op of this number, or kNone. Given once: later ops are spared.
  Point take(Op kind, uint64_t number) {
    bool here = number == op;
    if (at == Point::kBetweenDispatchAndCombine) here = kind == Op::kCombine && number >= op;
    if (at == Point::kInBackward) here = kind >= Op::kDispatchBackward && number >= op;
    return here ? std::exchange(at, Point::kNone) : Point::kNone;
  }

  // False when this rank is to fail here. kCorrupt does nothing by itself: see `corrupt`.
  bool strike() const {
    if (action == Action::kKill) kill(getpid(), SIGKILL);
    if (action == Action::kStop) kill(getpid(), SIGSTOP);
    if (action == Action::kSleep) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return action != Action::kRaise;
  }
};

// Makes what this rank is about to announce impossible: a dispatch's counts and offsets, any other op's header.
inline void corrupt(const World& world, Op op, int window, Header& header) {
  if (op == Op::kDispatch) {
    const Layout::Window& o = world.layout.window[window];
    std::memset(world.at<char>(world.rank, o.counts), 0xff, o.pulls - o.counts);
  } else {
    header.status = Code::kPoisoned;  // neither accepted nor refused
  }
}

// A lane that stops half-way through the rows that are its share.
template <class Coop>
struct HalfWay : Coop {
  explicit HalfWay(const Coop& coop) : Coop(coop) {}
  Range share(int64_t n) const {
    const Range all = Coop::share(n);
    return {all.begin, all.begin + (all.end - all.begin) / 2, all.step};
  }
};

}  // namespace moe_rt
