// Rows on their way through shared memory: each warp has a ring of slots, which bulk copies fill and empty again.
//
// In registers a block has 32 KiB of rows under way (moving.h), which keeps links busy where many blocks do it, and not
// where an op is given a few. Bulk copies go on by themselves, so a block has as much under way as its shared memory
// holds. One lane of each warp starts them: a piece of a row into a slot, and once it has come from there to each of its
// places, so that a row is read once. A slot's places wait in the slot, while pieces of the next rows are on their way.
//
// `Copies` are the bulk copies of one lane (bulk.h; tests/device/emulated_ring.h):
//   open(barriers, stride)            makes a barrier for each slot, and shows copies what peers have written
//   load(barrier, to, from, bytes)    starts one into shared memory
//   await_load(barrier, parity)       until that one is there; `parity` is that of the slot's turn
//   store(to, from, bytes), commit()  starts one out of it; ends a group of these
//   await_reads<n>()                  until all groups but the last n no longer need their slots
//   await_stores()                    until all stores are there, and a release of this lane tells of them
#pragma once

#include "../protocol/core/codec.h"
#include "moving.h"

namespace moe_rt {

inline constexpr int kRingSlots = 8;
inline constexpr int kRingStores = 2;                        // pieces that may still leave their slots
inline constexpr int kRingLoads = kRingSlots - kRingStores;  // pieces of a warp on their way into slots
inline constexpr int64_t kRingAlign = 128, kRingFrame = 64;  // bytes; of a block's shared memory, its frame's

// Where the rings of a block's warps lie: part of every launch's arguments.
struct RingMemory {
  int32_t at;     // bytes of scratch before the first
  int32_t bytes;  // of each
  int32_t piece;  // bytes of a row that a slot holds at most
  int32_t first;  // bytes of a ring before its first piece

  // In what is left of a block's shared memory behind its scratch. A piece of no bytes: there is no room.
  MOE_RT_FN static RingMemory make(int64_t scratch_bytes, int64_t block_bytes, int32_t warps, int32_t num_topk) {
    const int64_t at = round_up(scratch_bytes, kRingAlign), room = block_bytes - kRingFrame - at;
    const int64_t first = round_up(int64_t{kRingSlots + 1} * slot_bytes(num_topk), kRingAlign);
    const int64_t piece = (room / warps - first) / kRingSlots / kRingAlign * kRingAlign;
    const int64_t bytes = first + kRingSlots * larger<int64_t>(piece, 0);
    return {int32_t(at), int32_t(bytes), int32_t(larger<int64_t>(piece, 0)), int32_t(first)};
  }
  // What a slot needs besides its piece: a barrier, how many bytes and places, and the places.
  MOE_RT_FN static int32_t slot_bytes(int32_t num_topk) { return 8 * (2 + num_topk); }
};
static_assert(sizeof(RingMemory) == 16, "the host's layout");

template <class Copies>
class Ring {
 public:
  // `scratch` is the block's; the rings of all its warps lie there side by side.
  MOE_RT_FN Ring(const RingMemory& memory, int num_topk, char* scratch, int warp)
      : memory_(memory),
        slot_bytes_(RingMemory::slot_bytes(num_topk)),
        ring_(scratch + memory.at + int64_t{warp} * memory.bytes) {}

  // Before the first row, once in a launch: all lanes call it.
  template <class Group>
  MOE_RT_FN void open(const Group& group) {
    if (group.team_lane() == 0) copies_.open(ring_, slot_bytes_);
  }

  // The row at src to each place that each_place gives to its argument, by the warps of a group: all lanes call it.
  // Source and places stay as they are until finish().
  template <class Group, class EachPlace>
  MOE_RT_FN void move(const Group& group, const char* src, int bytes, EachPlace&& each_place) {
    if (group.team_lane() != 0) return;
    // The row's places wait behind those of the slots: in registers they would take as many as eight addresses need.
    char** const places = slot_at(kRingSlots).places;
    char** end = places;
    each_place([&](char* dst) { *end++ = dst; });
    const int num = int(end - places), step = group.teams() * memory_.piece;
    for (int first = group.team() * memory_.piece; first < bytes; first += step) {
      if (loaded_ - stored_ == kRingLoads) store_oldest();
      // The piece that was in this slot is one of the groups before the last kRingStores.
      copies_.template await_reads<kRingStores>();
      const Slot slot = slot_at(loaded_ % kRingSlots);
      for (int i = 0; i < num; ++i) slot.places[i] = places[i] + first;
      *slot.num = num;
      const int num_bytes = smaller(memory_.piece, bytes - first);
      *slot.bytes = num_bytes;
      copies_.load(slot.barrier, slot.piece, src + first, num_bytes);
      ++loaded_;
    }
  }

  // Until all that this warp has moved is where it belongs: before an op is announced, and before a launch ends.
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

// How DeviceRows moves rows as they are (rows.h): through a ring.
template <class RingType>
struct ThroughRing {
  RingType& ring;
  template <class Vector, class Group, class EachPlace>
  MOE_RT_FN void move(const Group& group, int num_vectors, const char* src, EachPlace&& each_place) const {
    ring.move(group, src, num_vectors * int(sizeof(Vector)), each_place);
  }
};

// Whether a machine has rings, and rows of a kind are of the buffer's elements.
template <class Machine, class Kind>
inline constexpr bool kThroughRing = requires(const Machine& m, const Kind& kind) {
  m.links.ring(m, 1);
  Codec{kind};
};

// fn(moving): how a group moves rows of a kind that move as they are. All are where they belong when it returns.
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
