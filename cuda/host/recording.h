// Writing a rank's flights and its plaque, and reading a flight that may be changing: a sequence lock over one slot.
#pragma once

#include <unistd.h>

#include <array>
#include <bit>
#include <vector>

#include "../protocol/layout.h"

namespace moe_rt {

using FlightWords = std::array<uint64_t, kFlightWords>;

// SYNC POINT flight, writer side: pairs with read_flight. The stamp is odd while the words change. Each word is a
// release, so that a reader who sees it sees the odd stamp, too; the even stamp is one, so that whoever sees it sees
// all words. Without either: 1. reader loads the stamp, 2. half of the next op is written, 3. reader takes a mixture
// of two ops for one.
inline void write_flight(FlightSlot& slot, const Flight& flight) {
  const auto words = std::bit_cast<FlightWords>(flight);
  const uint64_t stamp = load_relaxed(slot.stamp);
  store_relaxed(slot.stamp, stamp + 1);
  for (int i = 0; i < kFlightWords; ++i) store_release(slot.words[i], words[i]);
  store_release(slot.stamp, stamp + 2);
}

// SYNC POINT flight, reader side. The words are acquires, so that the second look at the stamp comes after them. False
// when the slot was changing, as it stays if its owner was stopped or killed in the middle.
inline bool read_flight(const FlightSlot& slot, Flight& flight) {
  const uint64_t stamp = load_acquire(slot.stamp);
  FlightWords words;
  for (int i = 0; i < kFlightWords; ++i) words[i] = load_acquire(slot.words[i]);
  flight = std::bit_cast<Flight>(words);
  return stamp % 2 == 0 && load_relaxed(slot.stamp) == stamp;
}

// SYNC POINT plaque, writer side: pairs with read_segment. Without the release a reader could take the magic for
// granted and read offsets that are not there yet. `members` has an entry for each rank.
inline void write_plaque(char* segment, const Shape& s, int rank, uint64_t config, const std::vector<Member>& members) {
  const Layout l = Layout::make(s);
  std::copy(members.begin(), members.end(), reinterpret_cast<Member*>(segment + l.members));
  auto& plaque = *reinterpret_cast<Plaque*>(segment);
  plaque = {0,         kPlaqueVersion, rank,         getpid(),    s.num_ranks, s.num_experts, s.num_max_tokens,
            s.hidden,  s.num_topk,     s.elem_bytes, s.acc_bytes, config,      l.poison,      l.mailboxes,
            l.members, l.flights,      l.bytes};
  store_release(plaque.magic, kPlaqueMagic);
}

}  // namespace moe_rt
