// Finds the memory at an address, and reports addresses without memory.
#include "places.h"

#include <cstdio>

namespace ptx {
namespace {

std::string hex(uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

[[noreturn]] void out_of_bounds(const Lane& lane, const char* space, uint64_t address, uint32_t bytes) {
  std::string what = "out of bounds: " + std::to_string(bytes) + " bytes of " + space + " memory at " + hex(address);
  const Extent* const below = Device::get().memory.below(address);
  if (below && address - below->begin < below->bytes + 4096) {
    what += ", which is " + std::to_string(address - below->begin) + " bytes into an allocation of " +
            std::to_string(below->bytes);
  }
  Device::get().fail(lane, what);
}

bool within(uint64_t offset, uint32_t bytes, uint64_t begin, uint64_t size) {
  return offset >= begin && offset - begin < size && bytes <= size - (offset - begin);
}

Place in_params(const Lane& lane, uint64_t address, uint32_t bytes, uint32_t how) {
  const Launch& launch = *lane.block->of->launch;
  const uint64_t which = address / kParamStride, offset = address % kParamStride;
  if (how != kRead || which >= launch.entry->num_params ||
      !within(offset, bytes, 0, launch.entry->param_bytes[which])) {
    out_of_bounds(lane, "parameter", address, bytes);
  }
  uint64_t before = 0;
  for (uint64_t i = 0; i < which; ++i) before += launch.entry->param_bytes[i];
  return {const_cast<char*>(launch.params.data()) + before + offset, nullptr, 0, nullptr};
}

Place in_shared(const Lane& lane, uint64_t offset, uint32_t bytes) {
  Block& block = *lane.block;
  const Launch& launch = *block.of->launch;
  if (!within(offset, bytes, 0, launch.entry->static_bytes) &&
      !within(offset, bytes, launch.entry->dynamic_offset, launch.dynamic_bytes)) {
    out_of_bounds(lane, "shared", offset, bytes);
  }
  return {block.shared.data() + offset, &block.shadow, offset, nullptr};
}

Place in_local(Lane& lane, uint64_t offset, uint32_t bytes) {
  if (!within(offset, bytes, 0, lane.block->of->launch->entry->local_bytes)) {
    out_of_bounds(lane, "local", offset, bytes);
  }
  return {lane.local.data() + offset, nullptr, 0, nullptr};
}

Place in_global(const Lane& lane, uint64_t address, uint32_t bytes) {
  Extent* const extent = Device::get().memory.find(address, bytes);
  if (!extent) out_of_bounds(lane, "global", address, bytes);
  return {reinterpret_cast<void*>(address), &extent->shadow, address - extent->begin, extent};
}

}  // namespace

Place find(Lane& lane, Space space, uint64_t address, uint32_t bytes, uint32_t how, uint32_t align) {
  if (address % align != 0) {
    Device::get().fail(lane, "misaligned: " + std::to_string(bytes) + " bytes at " + hex(address));
  }
  if (space == kParam) return in_params(lane, address, bytes, how);
  if (space == kShared) return in_shared(lane, address, bytes);
  if (space == kLocal) return in_local(lane, address, bytes);
  if (space == kGeneric) {
    if (ptx_is_local(lane, address)) return in_local(lane, address - ptx_local(lane), bytes);
    const uint64_t offset = address - ptx_shared(lane);
    if (offset < lane.block->shared.size()) return in_shared(lane, offset, bytes);
  }
  return in_global(lane, address, bytes);
}

void report_race(const Lane& lane, const Place& place, uint32_t how, const Record& other, const char* what) {
  Device& device = Device::get();
  const std::string mine = how & kWrite ? "write" : "read", earlier = other.how & kWrite ? "write" : "read";
  const std::string why = what ? std::string(what) + " " + earlier + " of"
                               : "nothing orders this " + mine + " after the " + earlier + " of";
  device.fail(lane, std::string("race on ") + (place.extent ? "global" : "shared") + " memory: " + why + "\n  " +
                        device.describe(other));
}

}  // namespace ptx
