// Where an access takes place, if that is inside of what its lane may access.
#pragma once

#include <string>

#include "device.h"

namespace ptx {

struct Place {
  void* pointer;
  Shadow* shadow;  // nullptr for memory of one lane, and for what nobody writes
  uint64_t offset;
  Extent* extent;  // of global memory
};

Place find(Lane& lane, Space space, uint64_t address, uint32_t bytes, uint32_t how, uint32_t align);

// Whether what a site orders is left out; it counts as reached.
bool is_muted(const Lane& lane, int site);

// Whether the lane is the last of its warp's lanes, or of its block's, to come; then all go on.
bool gather(Lane& lane, uint32_t value, uint32_t mask, int site);
bool meet(Lane& lane, bool block, int site);

// `what` is wrong with the earlier access; without it, that nothing orders the two.
[[noreturn]] void report_race(const Lane& lane, const Place& place, uint32_t how, const Record& other,
                              const char* what);

}  // namespace ptx
