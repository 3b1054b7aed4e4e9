// Fibers: stacks that switch without a system call.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <csetjmp>
#include <stdexcept>
#include <vector>

namespace ptx {

class Stacks {
 public:
  static constexpr size_t kBytes = 128 << 10, kGuard = 4096;

  char* take() {
    if (!free_.empty()) {
      char* const stack = free_.back();
      free_.pop_back();
      return stack;
    }
    void* const made =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (made == MAP_FAILED) throw std::runtime_error("no room for a lane's stack");
    mprotect(made, kGuard, PROT_NONE);
    return static_cast<char*>(made);
  }
  void give(char* stack) { free_.push_back(stack); }

 private:
  std::vector<char*> free_;
};

// Continue at `to` until something switches back to `from`.
[[gnu::noinline]] inline void switch_fiber(jmp_buf from, jmp_buf to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

// Run start() on a new stack until something switches back to `from`; start never returns.
[[gnu::noinline]] inline void start_fiber(jmp_buf from, char* stack, void (*start)()) {
  if (_setjmp(from) != 0) return;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = Stacks::kBytes;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
  setcontext(&context);
}

}  // namespace ptx
