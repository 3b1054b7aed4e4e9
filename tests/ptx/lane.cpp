// What lanes ask for: memory, with every access checked; barriers; and the collectives of a warp.
#include "lane.h"

#include <bit>
#include <cstdio>

#include "device.h"

namespace ptx {
namespace {

struct Place {
  void* pointer;
  Shadow* shadow;  // nullptr for memory of one lane, and for what nobody writes
  uint64_t offset;
  Extent* extent;
};

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

Place find(Lane& lane, Space space, uint64_t address, uint32_t bytes, uint32_t how) {
  if (address % bytes != 0) {
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

// A release leaves what the lane knows at the address; whoever acquires there in the same scope learns it. A write that
// is no release leaves nothing, unless it is part of a read-modify-write, which passes on what it found.
void synchronize(Lane& lane, Extent& extent, uint64_t address, uint32_t how) {
  Device& device = Device::get();
  const uint32_t stream = lane.block->of->stream;
  auto& [on_device, on_system] = extent.released;
  if (how & kAcquire) {
    if (!lane.learned) lane.learned = std::make_unique<Clock>();
    for (const auto& [from, clock] : on_system[address]) {
      if (from == stream || (how & kSystem)) lane.learned->join(clock, device.names);
    }
    for (const auto& [from, clock] : on_device[address]) {
      if (from == stream) lane.learned->join(clock, device.names);
    }
  }
  if ((how & kWrite) && !(how & kRead)) on_device.erase(address), on_system.erase(address);
  if (how & kRelease) {
    (how & kSystem ? on_system : on_device)[address][stream].join(device.knowledge(lane), device.names);
    ++lane.releases;
  }
}

void check_race(Lane& lane, const Place& place, uint32_t bytes, uint32_t how) {
  Device& device = Device::get();
  const Moment now{lane.block->uid, uint16_t(lane.ids.tid), lane.block->barriers, lane.releases};
  const Record mine{now, uint16_t(how), lane.site};
  const auto ordered = [&](const Record& earlier) { return device.ordered(lane, earlier, mine); };
  place.shadow->visit(place.offset, bytes, mine, ordered, [&](const Record& other) {
    const char* const space = place.extent ? "global" : "shared";
    device.fail(lane, std::string("race on ") + space + " memory: nothing orders this " +
                          (how & kWrite ? "write" : "read") + " after the " + (other.how & kWrite ? "write" : "read") +
                          " of\n  " + device.describe(other));
  });
}

// Waits until every lane of the mask is here; `given` of each is then in `got`.
void gather(Lane& lane, uint32_t value, uint32_t mask, int site) {
  Device& device = Device::get();
  lane.site = site;
  device.pause(lane);
  Block& block = *lane.block;
  Warp& warp = block.warps[lane.ids.tid / 32];
  const uint32_t bit = 1u << lane.ids.tid % 32;
  if (!(mask & bit)) device.fail(lane, "wrong mask: it does not name this lane");
  if (mask & warp.gone) device.fail(lane, "wrong mask: it names lanes that have ended");
  if (warp.mask && (warp.mask != mask || warp.site != site)) {
    device.fail(lane, "wrong mask: lanes of a warp are in different collectives");
  }
  warp.mask = mask, warp.site = site, warp.arrived |= bit;
  lane.given = value;
  if (warp.arrived != mask) {
    lane.state = State::kInWarp;
    ++block.blocked;
    device.pause(lane);
    return;
  }
  Lane* const first = &block.lanes[lane.ids.tid / 32 * 32];
  for (uint32_t i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    for (uint32_t j = 0; j < 32; ++j) first[i].got[j] = mask >> j & 1 ? first[j].given : 0;
    if (first[i].state == State::kInWarp) --block.blocked;
    device.make_ready(first[i]);
  }
  warp = {.gone = warp.gone};
}

}  // namespace
}  // namespace ptx

using ptx::Device;
using ptx::Lane;

void* ptx_access(Lane& lane, ptx::Space space, uint64_t address, uint32_t bytes, uint32_t how, int site) {
  lane.site = site;
  if ((how & ptx::kAtomic) || --lane.patience <= 0) Device::get().pause(lane);
  ++Device::get().accesses_;
  const ptx::Place place = ptx::find(lane, space, address, bytes, how);
  if (place.shadow) ptx::check_race(lane, place, bytes, how);
  if (place.extent && (how & ptx::kAtomic)) ptx::synchronize(lane, *place.extent, address, how);
  return place.pointer;
}

void ptx_barrier(Lane& lane, int site) {
  Device& device = Device::get();
  lane.site = site;
  device.pause(lane);
  ptx::Block& block = *lane.block;
  if (block.at_barrier > 0 && block.barrier_site != site) {
    device.fail(lane, "barrier divergence: other lanes wait at another barrier");
  }
  for (const ptx::Warp& warp : block.warps) {
    if (warp.gone) device.fail(lane, "barrier divergence: other lanes have ended");
  }
  block.barrier_site = site;
  if (++block.at_barrier < block.lanes.size()) {
    lane.state = ptx::State::kAtBarrier;
    ++block.blocked;
    device.pause(lane);
    return;
  }
  block.at_barrier = block.blocked = 0;
  ++block.barriers;
  for (Lane& other : block.lanes) {
    if (other.learned) block.clock.join(*other.learned, device.names);
    other.learned.reset();
    device.make_ready(other);
  }
}

ptx::Shuffled ptx_shuffle(Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site) {
  ptx::gather(lane, value, mask, site);
  const uint32_t own = lane.ids.tid % 32, segments = clamp >> 8 & 31;
  const uint32_t last = (own & segments) | (clamp & 31 & ~segments);
  const uint32_t source = (own ^ by) & 31;
  if (source > last) return {value, false};
  if (!(mask >> source & 1)) Device::get().fail(lane, "wrong mask: it does not name the lane that is asked");
  return {lane.got[source], true};
}

uint32_t ptx_reduce_max(Lane& lane, uint32_t value, uint32_t mask, int site) {
  ptx::gather(lane, value, mask, site);
  uint32_t most = 0;
  for (uint32_t i = 0; i < 32; ++i) {
    if (mask >> i & 1) most = std::max(most, lane.got[i]);
  }
  return most;
}

void ptx_sleep(Lane& lane, int site) {
  lane.site = site;
  lane.napped = true;
  Device::get().pause(lane);
}

uint64_t ptx_clock(Lane&) { return Device::get().clock_ns(); }

uint64_t ptx_local(Lane& lane) { return reinterpret_cast<uint64_t>(lane.local.data()); }
uint64_t ptx_shared(Lane& lane) { return reinterpret_cast<uint64_t>(lane.block->shared.data()); }
bool ptx_is_local(Lane& lane, uint64_t address) { return address - ptx_local(lane) < lane.local.size(); }
