// Private memory that reserves address space for the maximum; the system allocates a page when it is first written.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#include "../protocol/core/layout.h"

namespace moe_rt {

class LazyMemory {
 public:
  // Throws std::system_error if the address space cannot be reserved.
  explicit LazyMemory(int64_t bytes) : bytes_(max_of(bytes, kPage)) {
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
