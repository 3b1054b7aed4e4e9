// The place of an access, if it is inside the memory that its lane may access.
#pragma once

#include <string>

#include "device.h"

namespace ptx {

struct Place {
  void* pointer;
  Shadow* shadow;  // nullptr for memory of one lane, and for read-only memory
  uint64_t offset;
  Extent* extent;  // global memory only
};

Place find(Lane& lane, Space space, uint64_t address, uint32_t bytes, uint32_t how, uint32_t align);

// True if a site's order is left out; the site still counts as reached.
bool is_muted(const Lane& lane, int site);

// Wait for the other lanes of the warp, or of the block. True on the last lane to arrive.
bool gather(Lane& lane, uint32_t value, uint32_t mask, int site);
bool meet(Lane& lane, bool block, int site);

// `what` says what is wrong with the earlier access; nullptr means that nothing orders the two.
[[noreturn]] void report_race(const Lane& lane, const Place& place, uint32_t how, const Record& other,
                              const char* what);

}  // namespace ptx
