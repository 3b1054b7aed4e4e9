// Private memory whose pages are taken only when something is written there: room for the most that may come.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#include "../protocol/core/layout.h"

namespace moe_rt {

class LazyMemory {
 public:
  // Throws std::system_error where there is no address space for so many bytes.
  explicit LazyMemory(int64_t bytes) : bytes_(larger(bytes, kPage)) {
    void* const mapped =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    start_ = static_cast<char*>(mapped);
  }
  ~LazyMemory() { munmap(start_, bytes_); }
  LazyMemory(const LazyMemory&) = delete;
  LazyMemory& operator=(const LazyMemory&) = delete;

  char* start() const { return start_; }

 private:
  int64_t bytes_;
  char* start_;
};

}  // namespace moe_rt
