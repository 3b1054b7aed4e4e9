// Lane operations on mbarriers and bulk copies, and the arrival of copies.
#include "bulk.h"

#include <algorithm>

#include "device.h"
#include "places.h"

namespace ptx {
namespace {

constexpr uint32_t kUnit = 16;  // addresses and sizes of copies are multiples of this
constexpr uint32_t kMostPieces = 4;
constexpr int64_t kMostBytes = (1 << 20) - 1;  // maximum transaction count of a barrier

void end_phase(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.done.join(barrier.arriving, Device::get().names);
  barrier.arriving = {};
}

// Return the mbarrier at an address. Its word is only accessed atomically, as a whole.
Mbarrier& barrier_at(Lane& lane, uint64_t address, int site) {
  ptx_access(lane, kShared, address, 8, kRead | kWrite | kAtomic, site);
  const auto found = lane.block->mbarriers.find(address);
  if (found == lane.block->mbarriers.end()) Device::get().fail(lane, "no mbarrier: none was made at this address");
  return found->second;
}

Started& started(Lane& lane) {
  if (lane.started) return *lane.started;
  lane.started = std::make_unique<Started>();
  for (uint32_t* const uid : {&lane.started->in, &lane.started->out_reads, &lane.started->out_writes}) {
    *uid = Device::get().name_copies(lane);
  }
  return *lane.started;
}

// Check one side of a copy as if it happened now. A copy sees earlier writes of lanes only after a fence.
char* side(Lane& lane, Space space, uint64_t address, uint32_t bytes, How how, uint32_t copies, uint16_t number) {
  Device& device = Device::get();
  const Place place = find(lane, space, address, bytes, how, kUnit);
  const Proxy proxy = space == kShared ? kCopiesOfShared : kCopiesOfGlobal;
  const Record mine{{copies, number, number, 0, 0}, uint16_t(how), lane.at()};
  const Record own{device.now(lane), uint16_t(how), lane.at()};
  Record last;
  bool last_ordered = false;
  const auto ordered = [&](const Record& earlier) {
    if (earlier.moment == last.moment && earlier.how == last.how) return last_ordered;
    last = earlier;
    const bool by_lanes = device.past(earlier.moment.block).owner == earlier.moment.block;
    const bool near = !by_lanes && device.past(earlier.moment.block).owner == lane.block->uid;
    const bool needs_fence = (earlier.how & kWrite) && !near;
    last_ordered = needs_fence ? device.knows(lane, earlier.moment, proxy) : device.ordered(lane, earlier, own);
    return last_ordered;
  };
  place.shadow->visit(place.offset, bytes, mine, ordered, [&](const Record& other) {
    const bool known = device.ordered(lane, other, own);
    report_race(lane, place, how, other, known ? "no fence shows copies the" : nullptr);
  });
  return static_cast<char*>(place.pointer);
}

void check_size(Lane& lane, uint32_t bytes, uint16_t number) {
  if (bytes == 0 || bytes % kUnit != 0) {
    Device::get().fail(lane, "wrong size: a copy of " + std::to_string(bytes) + " bytes, not of a multiple of 16");
  }
  if (number >= Started::kMost) Device::get().fail(lane, "a lane has started more copies than the tool can count");
}

}  // namespace

void Flight::start(Piece copy) {
  Device& device = Device::get();
  std::vector<uint32_t> cuts{0, copy.bytes};
  for (uint32_t i = 1; i < kMostPieces; ++i) cuts.push_back(uint32_t(device.random() % (copy.bytes / kUnit)) * kUnit);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  copy.left = std::make_shared<uint32_t>(uint32_t(cuts.size() - 1));
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    pieces_.push_back(copy);
    pieces_.back().to += cuts[i], pieces_.back().from += cuts[i], pieces_.back().bytes = cuts[i + 1] - cuts[i];
  }
}

bool Flight::step(Piece& piece) {
  if (!piece.out) {
    std::memcpy(piece.to, piece.from, piece.bytes);
    Mbarrier& barrier = piece.block->mbarriers.at(piece.barrier);
    barrier.bytes -= piece.bytes;
    if (barrier.bytes < 0 && barrier.pending == 0) {
      piece.lane->site = piece.site;
      Device::get().die(*piece.lane, "more bytes arrive than an mbarrier expects: its phase never ends");
    }
    if (--*piece.left == 0) {
      barrier.arriving.learn_copy(kLanes, piece.copies, piece.number);
      barrier.filled = barrier.phase + 1;
    }
    end_phase(barrier);
    return true;
  }
  if (piece.read.empty()) {
    piece.read.assign(piece.from, piece.from + piece.bytes);
    return false;
  }
  std::memcpy(piece.to, piece.read.data(), piece.bytes);
  return true;
}

void Flight::arrive(uint64_t random) {
  const auto piece = pieces_.begin() + ptrdiff_t(random % pieces_.size());
  if (step(*piece)) pieces_.erase(piece);
}

void Flight::arrive_all(const Block& block) {
  std::erase_if(pieces_, [&](Piece& piece) { return piece.block == &block && (step(piece) || step(piece)); });
}

const Piece* Flight::out_before(const Lane& lane, uint16_t until, bool read) const {
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return piece.out && piece.lane == &lane && piece.number < until && (!read || piece.read.empty());
  });
  return found == pieces_.end() ? nullptr : &*found;
}

const Piece* Flight::into(const Block& block) const {
  const auto found = std::find_if(pieces_.begin(), pieces_.end(),
                                  [&](const Piece& piece) { return !piece.out && piece.block == &block; });
  return found == pieces_.end() ? nullptr : &*found;
}

void leave_copies(Lane& lane) {
  Device& device = Device::get();
  Block& block = *lane.block;
  if (lane.started && lane.started->num_read < lane.started->num_out) {
    device.fail(lane, "a lane ends that has not waited until its bulk copies have read");
  }
  if (block.alive > 1) return;
  for (const auto& [at, barrier] : block.mbarriers) {
    if (barrier.bytes != 0 || barrier.filled > barrier.seen) {
      device.fail(lane, "a block ends that has not waited for a bulk copy into it");
    }
  }
  if (device.flight.into(block)) device.fail(lane, "a block ends that has not waited for a bulk copy into it");
  device.flight.arrive_all(block);  // a launch ends only after its writes
}

}  // namespace ptx

using ptx::Device;
using ptx::Lane;
using ptx::Mbarrier;
using ptx::Started;

void ptx_mbarrier_init(Lane& lane, uint64_t address, uint32_t count, int site) {
  ptx_access(lane, ptx::kShared, address, 8, ptx::kWrite, site);
  if (count == 0 || count >= 1u << 20) Device::get().fail(lane, "wrong count: an mbarrier of no or too many arrivals");
  const Mbarrier made{count, count, Device::get().now(lane)};
  if (!lane.block->mbarriers.emplace(address, made).second) Device::get().fail(lane, "an mbarrier is made twice");
}

void ptx_mbarrier_inval(Lane& lane, uint64_t address, int site) {
  const Mbarrier& barrier = ptx::barrier_at(lane, address, site);
  if (barrier.bytes != 0 || barrier.filled > barrier.seen) {
    Device::get().fail(lane, "an mbarrier is invalidated before its bytes were awaited");
  }
  lane.block->mbarriers.erase(address);
  ptx_access(lane, ptx::kShared, address, 8, ptx::kWrite, site);
}

void ptx_mbarrier_arrive(Lane& lane, uint64_t address, uint32_t count, uint32_t bytes, bool release, int site) {
  Device& device = Device::get();
  Mbarrier& barrier = ptx::barrier_at(lane, address, site);
  barrier.bytes += bytes;
  if (barrier.bytes > ptx::kMostBytes) device.fail(lane, "too many bytes for one phase of an mbarrier");
  if (count > barrier.pending) device.fail(lane, "more arrivals than the mbarrier was made for");
  barrier.pending -= count;
  if (release) {
    barrier.arriving.join(device.knowledge(lane), device.names);
    ++lane.releases;
  }
  ptx::end_phase(barrier);
}

// True if the phase of this parity is complete.
bool ptx_mbarrier_passed(Lane& lane, uint64_t address, uint32_t parity, bool acquire, int site) {
  Device& device = Device::get();
  Mbarrier& barrier = ptx::barrier_at(lane, address, site);
  if (ptx::is_muted(lane, site)) return true;
  if ((barrier.phase & 1) == (parity & 1)) {
    lane.napped = true;
    device.pause(lane);
    return false;
  }
  barrier.seen = barrier.phase;
  if (acquire) device.learned(lane).join(barrier.done, device.names);
  return true;
}

void ptx_copy_in(Lane& lane, uint64_t to, uint64_t from, uint32_t bytes, uint64_t barrier, int site) {
  Device& device = Device::get();
  Mbarrier& counts = ptx::barrier_at(lane, barrier, site);
  if (!counts.shown) device.fail(lane, "race on shared memory: no fence shows copies the mbarrier");
  Started& mine = ptx::started(lane);
  ptx::check_size(lane, bytes, mine.num_in);
  const uint16_t number = mine.num_in++;
  const char* const source = ptx::side(lane, ptx::kGlobal, from, bytes, ptx::kRead, mine.in, number);
  char* const target = ptx::side(lane, ptx::kShared, to, bytes, ptx::kWrite, mine.in, number);
  device.flight.start({&lane, lane.block, mine.in, number, site, target, source, bytes, false, barrier, nullptr});
}

void ptx_copy_out(Lane& lane, uint64_t to, uint64_t from, uint32_t bytes, int site) {
  lane.site = site;
  Device::get().pause(lane);
  Started& mine = ptx::started(lane);
  ptx::check_size(lane, bytes, mine.num_out);
  const uint16_t number = mine.num_out++;
  const char* const source = ptx::side(lane, ptx::kShared, from, bytes, ptx::kRead, mine.out_reads, number);
  char* const target = ptx::side(lane, ptx::kGlobal, to, bytes, ptx::kWrite, mine.out_writes, number);
  Device::get().flight.start({&lane, lane.block, 0, number, site, target, source, bytes, true, 0, nullptr});
}

void ptx_copy_commit(Lane& lane, int site) {
  lane.site = site;
  Started& mine = ptx::started(lane);
  mine.groups.push_back(mine.num_out);
}

// Wait until all but the last `groups` committed groups are complete, or have read their source.
void ptx_copy_wait(Lane& lane, uint32_t groups, bool read, int site) {
  Device& device = Device::get();
  Started& mine = ptx::started(lane);
  lane.site = site;
  if (ptx::is_muted(lane, site) || mine.groups.size() <= groups) return;
  const uint16_t until = mine.groups[mine.groups.size() - 1 - groups];
  while (device.flight.out_before(lane, until, read)) {
    lane.napped = true;
    device.pause(lane);
  }
  mine.num_read = std::max(mine.num_read, until);
  device.learned(lane).learn_copies(mine.out_reads, until);
  if (!read) device.learned(lane).learn_copies(mine.out_writes, until);
}

void ptx_show_copies(Lane& lane, bool shared, bool global, int site) {
  Device& device = Device::get();
  lane.site = site;
  if (ptx::is_muted(lane, site)) return;
  const ptx::Clock all = device.knowledge(lane);
  ++lane.releases;
  if (global) device.learned(lane).show(all, ptx::kCopiesOfGlobal);
  if (!shared) return;
  device.learned(lane).show(all, ptx::kCopiesOfShared);
  for (auto& [at, barrier] : lane.block->mbarriers) {
    if (barrier.made.barriers < lane.block->barriers) barrier.shown = true;
  }
  ptx_show_barriers(lane, site);
}

void ptx_show_barriers(Lane& lane, int site) {
  lane.site = site;
  if (ptx::is_muted(lane, site)) return;
  for (auto& [at, barrier] : lane.block->mbarriers) {
    if (barrier.made.lane == lane.ids.tid) barrier.shown = true;
  }
}
