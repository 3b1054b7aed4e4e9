// Moves of a row by a group of lanes: in vectors through registers, or in pieces through rings in shared memory.
//
// Neighbouring vectors are on neighbouring lanes, with several in flight. A block then has 32 KiB of rows in flight. That
// saturates the links only if many blocks do it, not if an op has only a few. Bulk copies are asynchronous, so a block has
// as much in flight as its shared memory holds. Each warp has a ring of slots there, and one of its lanes starts the
// copies: a piece of a row into a slot and, once it has arrived, from there to each of its destinations, so that a row is
// read once. A slot's destinations are stored in the slot, while pieces of the next rows are in flight.
//
// `Copies` are the bulk copies of one lane (bulk.h; tests/device/emulated_ring.h):
//   open(barriers, stride)            creates a barrier for each slot, and makes peers' writes visible to copies
//   load(barrier, to, from, bytes)    starts a copy into shared memory
//   await_load(barrier, parity)       waits for that copy; `parity` is that of the slot's use
//   store(to, from, bytes), commit()  starts a copy out of shared memory; ends a group of such copies
//   await_reads<n>()                  waits until all groups but the last n no longer need their slots
//   await_stores()                    waits until all stores are complete; a release of this lane then publishes them
#pragma once

#include "../protocol/core/codec.h"
#include "../protocol/core/tuning.h"

namespace moe_rt {

// Reads the n vectors of a row once; sink(to_row) may call to_row(dst) for each destination.
template <class Vector, class Group, class Sink>
MOE_RT_FN void move_vectors(const Group& group, int n, const char* src, Sink&& sink) {
  const int step = group.lanes() * tuning::kVectorsAtOnce;
  for (int first = group.lane(); first < n; first += step) {
    const auto at = [&](int i) { return first + i * group.lanes(); };
    Vector batch[tuning::kVectorsAtOnce];
    for (int i = 0; i < tuning::kVectorsAtOnce; ++i) {
      if (at(i) < n) batch[i] = reinterpret_cast<const Vector*>(src)[at(i)];
    }
    sink([&](char* dst) {
      for (int i = 0; i < tuning::kVectorsAtOnce; ++i) {
        if (at(i) < n) reinterpret_cast<Vector*>(dst)[at(i)] = batch[i];
      }
    });
  }
}

// Moves raw rows by lanes, through their registers. ThroughRing is the alternative.
struct ByLanes {
  template <class Vector, class Group, class Sink>
  MOE_RT_FN void move(const Group& group, int n, const char* src, Sink&& sink) const {
    move_vectors<Vector>(group, n, src, sink);
  }
};

inline constexpr int kRingSlots = tuning::kRingSlots, kRingStores = tuning::kRingStores;
inline constexpr int kRingLoads = kRingSlots - kRingStores;  // pieces of a warp in flight into slots
inline constexpr int64_t kRingAlign = 128, kRingFrame = 64;  // bytes: alignment; shared memory of a block's frame

// Place of the rings of a block's warps: part of every launch's arguments.
struct RingMemory {
  int32_t at;     // bytes of scratch before the first ring
  int32_t bytes;  // bytes of each ring
  int32_t piece;  // maximum bytes of a row in a slot
  int32_t first;  // bytes of a ring before its first piece

  // Places the rings in the shared memory after a block's scratch. A piece of 0 bytes means that the space does not
  // suffice.
  MOE_RT_FN static RingMemory make(int64_t scratch_bytes, int64_t block_bytes, int32_t warps, int32_t num_topk) {
    const int64_t at = round_up(scratch_bytes, kRingAlign), room = block_bytes - kRingFrame - at;
    const int64_t first = round_up(int64_t{kRingSlots + 1} * slot_bytes(num_topk), kRingAlign);
    const int64_t piece = (room / warps - first) / kRingSlots / kRingAlign * kRingAlign;
    const int64_t bytes = first + kRingSlots * max_of<int64_t>(piece, 0);
    return {int32_t(at), int32_t(bytes), int32_t(max_of<int64_t>(piece, 0)), int32_t(first)};
  }
  // Bytes of a slot without its piece: a barrier, the numbers of bytes and destinations, and the destinations.
  MOE_RT_FN static int32_t slot_bytes(int32_t num_topk) { return 8 * (2 + num_topk); }
};
static_assert(sizeof(RingMemory) == 16, "the host's layout");

template <class Copies>
class Ring {
 public:
  // `scratch` is the block's; it holds the rings of all its warps, one after another.
  MOE_RT_FN Ring(const RingMemory& memory, int num_topk, char* scratch, int warp)
      : memory_(memory),
        slot_bytes_(RingMemory::slot_bytes(num_topk)),
        ring_(scratch + memory.at + int64_t{warp} * memory.bytes) {}

  // Must be called by all lanes before the first row, once per launch.
  template <class Group>
  MOE_RT_FN void open(const Group& group) {
    if (group.team_lane() == 0) copies_.open(ring_, slot_bytes_);
  }

  // Moves the row at src to each place that each_place passes to its argument, by the warps of a group: all lanes call
  // it. Source and destinations must stay valid until finish().
  template <class Group, class EachPlace>
  MOE_RT_FN void move(const Group& group, const char* src, int bytes, EachPlace&& each_place) {
    if (group.team_lane() != 0) return;
    // The row's destinations are stored after those of the slots; registers would hold as many as eight addresses.
    char** const places = slot_at(kRingSlots).places;
    char** end = places;
    each_place([&](char* dst) { *end++ = dst; });
    const int num = int(end - places), step = group.teams() * memory_.piece;
    for (int first = group.team() * memory_.piece; first < bytes; first += step) {
      if (loaded_ - stored_ == kRingLoads) store_oldest();
      // The slot's previous piece belongs to a group before the last kRingStores.
      copies_.template await_reads<kRingStores>();
      const Slot slot = slot_at(loaded_ % kRingSlots);
      for (int i = 0; i < num; ++i) slot.places[i] = places[i] + first;
      *slot.num = num;
      const int num_bytes = min_of(memory_.piece, bytes - first);
      *slot.bytes = num_bytes;
      copies_.load(slot.barrier, slot.piece, src + first, num_bytes);
      ++loaded_;
    }
  }

  // Waits until everything that this warp has moved has arrived; called before an op is announced and before a launch
  // ends.
  template <class Group>
  MOE_RT_FN void finish(const Group& group) {
    if (group.team_lane() != 0) return;
    while (stored_ != loaded_) store_oldest();
    copies_.await_stores();
  }

 private:
  struct Slot {
    uint64_t* barrier;
    int32_t *num, *bytes;
    char** places;
    char* piece;
  };
  MOE_RT_FN Slot slot_at(int index) const {
    char* const slot = ring_ + index * slot_bytes_;
    auto* const numbers = reinterpret_cast<int32_t*>(slot + 8);
    return {reinterpret_cast<uint64_t*>(slot), numbers, numbers + 1, reinterpret_cast<char**>(slot + 16),
            ring_ + memory_.first + index * memory_.piece};
  }

  MOE_RT_FN void store_oldest() {
    const Slot slot = slot_at(stored_ % kRingSlots);
    copies_.await_load(slot.barrier, stored_ / kRingSlots & 1);
    for (int i = 0; i < *slot.num; ++i) copies_.store(slot.places[i], slot.piece, *slot.bytes);
    copies_.commit();
    ++stored_;
  }

  const RingMemory& memory_;
  const int32_t slot_bytes_;
  char* const ring_;
  Copies copies_;
  uint32_t loaded_ = 0, stored_ = 0;  // pieces
};

// Moves raw rows for DeviceRows (rows.h) through a ring.
template <class RingType>
struct ThroughRing {
  RingType& ring;
  template <class Vector, class Group, class EachPlace>
  MOE_RT_FN void move(const Group& group, int num_vectors, const char* src, EachPlace&& each_place) const {
    ring.move(group, src, num_vectors * int(sizeof(Vector)), each_place);
  }
};

// True if a machine has rings, and rows of a kind consist of the buffer's elements.
template <class Machine, class Kind>
inline constexpr bool kThroughRing = requires(const Machine& m, const Kind& kind) {
  m.links.ring(m, 1);
  Codec{kind};
};

// Calls fn(moving) with the way in which a group moves raw rows of a kind. All rows have arrived when it returns.
template <class Kind, class Machine, class Group, class Fn>
MOE_RT_FN void with_moving(const Machine& m, const Group& group, int num_topk, Fn&& fn) {
  if constexpr (kThroughRing<Machine, Kind>) {
    auto ring = m.links.ring(m, num_topk);
    ring.open(group);
    fn(ThroughRing<decltype(ring)>{ring});
    ring.finish(group);
  } else {
    fn(ByLanes{});
  }
}

}  // namespace moe_rt
