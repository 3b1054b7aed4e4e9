// Fault injection for tests: at one point of one op this rank dies, stops, sleeps, fails, or publishes invalid data.
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

// Points of an op. Values are those of moe_rt/faults.py, which itself implements the points outside of ops.
enum class Point : int32_t {
  kNone = 0,
  kPreRendezvous = 1,
  kPostRendezvous = 2,
  kMidPayload = 3,  // half of the rows are written
  kAfterPayload = 4,
  kAfterSomeFlags = 5,  // one peer has no announcement
  kAfterAllFlags = 6,
  kMidRead = 7,  // half of the rows are read
  kBetweenDispatchAndCombine = 8,
  kInBackward = 9,
  kInDestroy = 10,
  kBeforePassingOn = 11,  // data of other nodes has been moved, but not announced
};

enum class Action : int32_t { kNone = 0, kKill = 1, kStop = 2, kSleep = 3, kRaise = 4, kCorrupt = 5 };

struct Fault {
  Point at = Point::kNone;
  Action action = Action::kNone;
  uint64_t op = 0;  // count of ops from 1: the fault fires in the first op from this one on that has the point
  double seconds = 0;

  // Returns the point at which to fire in the op of this number, or kNone. It returns a point only once: later ops have
  // no fault.
  Point take(Op kind, uint64_t number) {
    bool here = number == op;
    if (at == Point::kBetweenDispatchAndCombine) here = kind == Op::kCombine && number >= op;
    if (at == Point::kInBackward) here = kind >= Op::kDispatchBackward && number >= op;
    return here ? std::exchange(at, Point::kNone) : Point::kNone;
  }

  // False if this rank must fail here. kCorrupt does nothing by itself: see `corrupt`.
  bool strike() const {
    if (action == Action::kKill) kill(getpid(), SIGKILL);
    if (action == Action::kStop) kill(getpid(), SIGSTOP);
    if (action == Action::kSleep) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return action != Action::kRaise;
  }
};

// Corrupts what this rank is about to announce: a dispatch's counts and offsets, any other op's header.
inline void corrupt(const World& world, Op op, int window, Header& header) {
  if (op == Op::kDispatch) {
    const Layout::Window& o = world.layout.window[window];
    std::memset(world.at<char>(world.rank, o.counts), 0xff, o.pulls - o.counts);
  } else {
    header.status = Code::kPoisoned;  // neither accepted nor refused
  }
}

// Lane that stops half-way through its share of rows.
template <class Coop>
struct HalfWay : Coop {
  explicit HalfWay(const Coop& coop) : Coop(coop) {}
  Range share(int64_t n) const {
    const Range all = Coop::share(n);
    return {all.begin, all.begin + (all.end - all.begin) / 2, all.step};
  }
};

}  // namespace moe_rt
