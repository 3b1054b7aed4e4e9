// Checks when an injected fault fires, what it does, and what half of a lane's share is. Exits with 1 and a message on
// the first error.
#include <sys/wait.h>

#include <chrono>
#include <string>
#include <vector>

#include "../../cuda/cpu/fault.h"
#include "../../cuda/cpu/team.h"
#include "../protocol/expect.h"

using namespace moe_rt;

namespace {

// A fault fires once: in its op, or in the first op from that one on that has its point.
void check_when() {
  const Op ops[] = {Op::kDispatch, Op::kCombine, Op::kCombineBackward, Op::kDispatchBackward,
                    Op::kDispatch, Op::kCombine, Op::kCombineBackward, Op::kDispatchBackward};
  for (int at = 0; at <= 11; ++at) {
    for (uint64_t asked = 1; asked <= 8; ++asked) {
      Fault fault{.at = Point(at), .action = Action::kRaise, .op = asked};
      uint64_t expected = asked, fired = 0;
      const auto has_point = [&](Op op) {
        if (Point(at) == Point::kBetweenDispatchAndCombine) return op == Op::kCombine;
        if (Point(at) == Point::kInBackward) return op == Op::kCombineBackward || op == Op::kDispatchBackward;
        return true;
      };
      while (expected <= 8 && !has_point(ops[expected - 1])) ++expected;
      for (uint64_t number = 1; number <= 8; ++number) {
        const Point point = fault.take(ops[number - 1], number);
        if (point == Point::kNone) continue;
        expect(point == Point(at) && fired == 0, "a fault fires at another point, or twice");
        fired = number;
      }
      expect(fired == (at == 0 || expected > 8 ? 0 : expected), "a fault fires in op " + std::to_string(fired));
    }
  }
}

// Returns how a child ends that strikes; it exits with whether it goes on.
int struck(Action action) {
  const pid_t child = fork();
  if (child == 0) _exit(Fault{.at = Point::kMidRead, .action = action, .op = 1, .seconds = 0}.strike() ? 1 : 2);
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  if (WIFSTOPPED(status)) kill(child, SIGKILL), waitpid(child, nullptr, 0);
  return status;
}

void check_what() {
  const int killed = struck(Action::kKill), stopped = struck(Action::kStop);
  expect(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGKILL, "a rank is killed");
  expect(WIFSTOPPED(stopped) && WSTOPSIG(stopped) == SIGSTOP, "a rank is stopped");
  for (const Action action : {Action::kNone, Action::kSleep, Action::kCorrupt}) {
    const int status = struck(action);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 1, "a rank goes on");
  }
  const int raised = struck(Action::kRaise);
  expect(WIFEXITED(raised) && WEXITSTATUS(raised) == 2, "a rank fails");
  const auto start = std::chrono::steady_clock::now();
  Fault{.at = Point::kMidRead, .action = Action::kSleep, .op = 1, .seconds = 0.02}.strike();
  expect(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(20), "a rank sleeps");
}

// Counts and offsets of the window are overwritten, and no byte after them; or the header.
void check_corruption() {
  const Shape shape{.num_ranks = 2,
                    .num_experts = 40,
                    .num_max_tokens = 3,
                    .hidden = 4,
                    .num_topk = 2,
                    .elem_bytes = 4,
                    .acc_bytes = 4};
  const Layout layout = Layout::make(shape);
  std::vector<char> memory(layout.bytes);
  char* const base[] = {nullptr, memory.data()};
  World w{};
  w.shape = shape, w.layout = layout, w.base = base, w.rank = 1;
  Header header{};
  corrupt(w, Op::kCombine, 1, header);
  expect(header.status == Code::kPoisoned, "a header is neither accepted nor refused");
  header.status = Code::kOk;
  for (const char byte : memory) expect(byte == 0, "an op without lists corrupts none");
  corrupt(w, Op::kDispatch, 1, header);
  expect(header.status == Code::kOk, "a dispatch with wrong lists is announced");
  for (int64_t i = 0; i < layout.bytes; ++i) {
    const bool inside = i >= layout.window[1].counts && i < layout.window[1].pulls;
    expect(memory[i] == (inside ? char(0xff) : 0), "counts and offsets are corrupt");
  }
}

void check_halves() {
  Barrier barrier(3);
  for (int64_t n = 0; n < 20; ++n) {
    for (int lane = 0; lane < 3; ++lane) {
      const TeamCoop coop{lane, 3, &barrier};
      const Range all = coop.share(n), half = HalfWay(coop).share(n);
      expect(half.begin == all.begin && half.step == all.step, "half of a share begins with it");
      expect(half.end - half.begin == (all.end - all.begin) / 2, "half of a share");
      expect(HalfWay(coop).rank() == lane && HalfWay(coop).size() == 3, "a lane that stops half-way");
    }
  }
}

}  // namespace

int main() {
  check_when(), check_what(), check_corruption(), check_halves();
  return 0;
}
