// Services for lanes: memory, with every access checked; barriers; and the collectives of a warp.
#include "lane.h"

#include <cstring>

#include "device.h"
#include "places.h"

namespace ptx {
namespace {

// A release stores the lane's knowledge at the address; an acquire there in the same scope learns it. A write without
// release clears it, unless it is part of a read-modify-write, which passes on what it found.
void synchronize(Lane& lane, Extent& extent, uint64_t address, uint32_t how) {
  Device& device = Device::get();
  const uint32_t stream = lane.block->of->stream;
  auto& [on_device, on_system] = extent.released;
  if (how & kAcquire) {
    Clock& learned = device.learned(lane);
    for (const auto& [from, clock] : on_system[address]) {
      if (from == stream || (how & kSystem)) learned.join(clock, device.names);
    }
    for (const auto& [from, clock] : on_device[address]) {
      if (from == stream) learned.join(clock, device.names);
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
  const Record mine{device.now(lane), uint16_t(how), lane.at()};
  Record last;  // neighbouring cells mostly contain the same access
  bool last_ordered = false;
  const auto ordered = [&](const Record& earlier) {
    if (earlier.moment == last.moment && earlier.how == last.how) return last_ordered;
    last = earlier;
    return last_ordered = device.ordered(lane, earlier, mine);
  };
  place.shadow->visit(place.offset, bytes, mine, ordered,
                      [&](const Record& other) { report_race(lane, place, how, other, nullptr); });
}

}  // namespace

bool is_muted(const Lane& lane, int site) {
  unsigned char& mark = lane.block->of->launch->entry->marks[site];
  mark |= kReached;
  return mark & kMuted;
}

// Wait until every lane of the mask is here; each lane's `given` is then in `got`. Return true on the last one to
// arrive.
bool gather(Lane& lane, uint32_t value, uint32_t mask, int site) {
  Device& device = Device::get();
  lane.site = site;
  lane.napped = false;
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
    return false;
  }
  Lane* const first = &block.lanes[lane.ids.tid / 32 * 32];
  uint32_t got[32];
  for (uint32_t i = 0; i < 32; ++i) got[i] = mask >> i & 1 ? first[i].given : 0;
  for (uint32_t i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    std::memcpy(first[i].got, got, sizeof(got));
    if (first[i].state == State::kInWarp) --block.blocked;
    device.make_ready(first[i]);
  }
  warp.mask = warp.arrived = 0;
  return true;
}

bool meet(Lane& lane, bool whole_block, int site) {
  if (!whole_block) return gather(lane, 0, ~uint32_t{0}, site);
  Device& device = Device::get();
  lane.site = site;
  lane.napped = false;
  device.pause(lane);
  Block& block = *lane.block;
  if (block.at_barrier > 0 && block.barrier_site != site) {
    device.fail(lane, "barrier divergence: other lanes wait at another barrier");
  }
  for (const Warp& warp : block.warps) {
    if (warp.gone) device.fail(lane, "barrier divergence: other lanes have ended");
  }
  block.barrier_site = site;
  if (++block.at_barrier < block.lanes.size()) {
    lane.state = State::kAtBarrier;
    ++block.blocked;
    device.pause(lane);
    return false;
  }
  block.at_barrier = block.blocked = 0;
  for (Lane& other : block.lanes) device.make_ready(other);
  return true;
}

}  // namespace ptx

using ptx::Device;
using ptx::Lane;

void* ptx_access(Lane& lane, ptx::Space space, uint64_t address, uint32_t bytes, uint32_t how, int site) {
  lane.site = site;
  if ((how & ptx::kAtomic) && ptx::is_muted(lane, site)) how &= ~(ptx::kAcquire | ptx::kRelease);
  if ((how & ptx::kAtomic) || --lane.patience <= 0) Device::get().pause(lane);
  ++Device::get().accesses_;
  if (how & ptx::kWrite) lane.napped = false;
  const ptx::Place place = ptx::find(lane, space, address, bytes, how, bytes);
  if (place.shadow) ptx::check_race(lane, place, bytes, how);
  if (place.extent && (how & ptx::kAtomic)) ptx::synchronize(lane, *place.extent, address, how);
  return place.pointer;
}

void ptx_barrier(Lane& lane, int site) {
  if (ptx::is_muted(lane, site) || !ptx::meet(lane, true, site)) return;
  Device& device = Device::get();
  ptx::Block& block = *lane.block;
  ++block.barriers;
  for (ptx::Warp& warp : block.warps) {
    block.clock.join(warp.clock, device.names);
    warp.clock = {};
  }
  for (Lane& other : block.lanes) {
    if (other.learned) block.clock.join(*other.learned, device.names);
    other.learned.reset();
  }
}

// Share the knowledge of every lane of the warp with all of them.
void ptx_warp_barrier(Lane& lane, uint32_t mask, int site) {
  Device& device = Device::get();
  const uint32_t warp_index = lane.ids.tid / 32, size = std::min(lane.ids.ntid - 32 * warp_index, 32u);
  lane.site = site;
  if (ptx::is_muted(lane, site)) return;
  if (mask << (32 - size) != ~uint32_t{0} << (32 - size)) {
    device.fail(lane, "wrong mask: a warp's barrier of some of its lanes, which the tool does not know");
  }
  if (!ptx::gather(lane, 0, size == 32 ? mask : mask & ~(~uint32_t{0} << size), site)) return;
  ptx::Warp& warp = lane.block->warps[warp_index];
  ++warp.syncs;
  for (uint32_t i = 0; i < size; ++i) {
    Lane& other = lane.block->lanes[32 * warp_index + i];
    if (other.learned) warp.clock.join(*other.learned, device.names);
    other.learned.reset();
  }
}

namespace {

// The value of the lane that find(own, segment, bound) names, or the own value if it names none. `segment` is the mask of
// the bits that lanes of one segment share, and `bound` the lane that the instruction may not pass.
template <class Find>
ptx::Shuffled shuffle(Lane& lane, uint32_t value, uint32_t clamp, uint32_t mask, int site, Find&& find) {
  ptx::gather(lane, value, mask, site);
  const uint32_t own = lane.ids.tid % 32, segment = clamp >> 8 & 31;
  const int source = find(own, segment, (own & segment) | (clamp & 31 & ~segment));
  if (source < 0) return {value, false};
  if (!(mask >> source & 1)) Device::get().fail(lane, "wrong mask: it does not name the lane that is asked");
  return {lane.got[source], true};
}

}  // namespace

ptx::Shuffled ptx_shuffle_bfly(Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site) {
  return shuffle(lane, value, clamp, mask, site, [&](uint32_t own, uint32_t, uint32_t last) {
    const uint32_t source = (own ^ by) & 31;
    return source <= last ? int(source) : -1;
  });
}

ptx::Shuffled ptx_shuffle_idx(Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site) {
  return shuffle(lane, value, clamp, mask, site, [&](uint32_t own, uint32_t segment, uint32_t last) {
    const uint32_t source = (own & segment) | (by & 31 & ~segment);
    return source <= last ? int(source) : -1;
  });
}

ptx::Shuffled ptx_shuffle_up(Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site) {
  return shuffle(lane, value, clamp, mask, site, [&](uint32_t own, uint32_t, uint32_t first) {
    const int source = int(own) - int(by & 31);
    return source >= int(first) ? source : -1;
  });
}

uint32_t ptx_reduce_max(Lane& lane, uint32_t value, uint32_t mask, int site) {
  ptx::gather(lane, value, mask, site);
  uint32_t most = 0;
  for (uint32_t i = 0; i < 32; ++i) {
    if (mask >> i & 1) most = std::max(most, lane.got[i]);
  }
  return most;
}

// The first call by any lane of a block counts for the whole block.
void ptx_let_next_begin(Lane& lane, int site) {
  lane.site = site;
  ptx::Block& block = *lane.block;
  if (!block.lets_next) block.lets_next = true, ++block.of->lets_next;
}

void ptx_await_launch_before(Lane& lane, int site) {
  lane.site = site;
  lane.napped = false;
  Device& device = Device::get();
  device.pause(lane);
  if (!ptx::is_muted(lane, site)) device.await_launch_before(lane);
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
