// Writing a rank's flights, its plaque and its last words, and reading what may be changing meanwhile.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
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
            l.members, l.flights,      l.bytes,      l.last_words};
  store_release(plaque.magic, kPlaqueMagic);
}

// SYNC POINT last words, writer side: pairs with read_last_words. Only the first words are kept, so that the text never
// changes under a reader; without the release one could see their length before the text.
inline void write_last_words(LastWords& words, std::string_view text) {
  if (load_relaxed(words.num_bytes) != 0) return;
  const size_t n = std::min(text.size(), sizeof(words.text));
  std::memcpy(words.text, text.data(), n);
  store_release(words.num_bytes, uint64_t{n});
}

// SYNC POINT last words, reader side. A peer may have written anything: any bytes come back, but never more than fit.
inline std::string read_last_words(const LastWords& words) {
  return {words.text, std::min<size_t>(load_acquire(words.num_bytes), sizeof(words.text))};
}

}  // namespace moe_rt
