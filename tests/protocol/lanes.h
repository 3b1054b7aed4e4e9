// Lanes of a team as fibers of one thread: each runs until its next sync, then the next one does. A run takes them
// forwards or backwards, so that a step which needs a sync that is missing fails in one of the two, on any machine.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "../../cuda/protocol/core/coop.h"

namespace moe_rt {

class Lanes {
 public:
  struct Coop {
    int rank_, size_;
    Lanes* lanes;
    int rank() const { return rank_; }
    int size() const { return size_; }
    bool leader() const { return true; }
    void sync() const { lanes->pass(rank_); }
    Range chunk(int64_t n) const { return contiguous_chunk(n, rank_, size_); }
    Range share(int64_t n) const { return chunk(n); }
  };

  // Runs fn(coop) on all lanes until they end. Returns false if some have ended while others still waited for them, which
  // only lanes of different warps may do.
  static bool run(int size, bool backwards, const std::function<void(const Coop&)>& fn) {
    Lanes lanes(size, fn);
    bool together = true;
    for (int running = size; running > 0;) {
      for (int i = 0; i < size; ++i) {
        const int lane = lanes.current_ = backwards ? size - 1 - i : i;
        if (!lanes.ended_[lane]) swapcontext(&lanes.caller_, &lanes.contexts_[lane]);
      }
      running = int(std::count(lanes.ended_.begin(), lanes.ended_.end(), false));
      together = together && (running == 0 || running == size);
    }
    return together;
  }

 private:
  static constexpr size_t kStack = 64 << 10;

  Lanes(int size, const std::function<void(const Coop&)>& fn) : fn_(fn), contexts_(size), ended_(size) {
    for (int lane = 0; lane < size; ++lane) {
      stacks_.emplace_back(new char[kStack]);
      ucontext_t& context = contexts_[lane];
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_.back().get();
      context.uc_stack.ss_size = kStack;
      context.uc_link = &caller_;
      running() = this;
      makecontext(&context, enter, 0);
    }
  }
  static Lanes*& running() {
    static Lanes* running = nullptr;
    return running;
  }
  static void enter() {
    Lanes& lanes = *running();
    const int lane = lanes.current_;
    lanes.fn_(Coop{lane, int(lanes.contexts_.size()), &lanes});
    lanes.ended_[lane] = true;
  }
  void pass(int lane) { swapcontext(&contexts_[lane], &caller_); }

  const std::function<void(const Coop&)>& fn_;
  std::vector<ucontext_t> contexts_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  ucontext_t caller_{};
  std::vector<bool> ended_;
  int current_ = 0;
};

}  // namespace moe_rt
