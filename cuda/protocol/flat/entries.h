// Routing entry of an expert: its owner and place in one word, so that routing by tiles (routing_tiles.h) takes one
// load per entry of topk_idx.
#pragma once

#include "../core/dims.h"
#include "../core/layout.h"

namespace moe_rt {

// Bits: owner << 16 | flags | place. kNoEntry is negative and has no flags.
inline constexpr int32_t kNoEntry = -(1 << 16);
inline constexpr int32_t kRepeats = 1 << 15;  // an earlier entry of the token names the same expert
inline constexpr int32_t kLeads = 1 << 14;    // no earlier entry of the token names an expert of the same owner
inline constexpr int32_t kMaxPlaces = 1 << 14;
MOE_RT_FN constexpr int32_t owner_of(int32_t entry) { return entry >> 16; }
MOE_RT_FN constexpr int32_t place_of(int32_t entry) { return entry & (kMaxPlaces - 1); }
MOE_RT_FN constexpr bool has(int32_t entry, int32_t flag) { return (entry & flag) != 0; }

// Returns the k-th of a token's entries, which have no flags yet, with its flags. Hence every expert that a token visits
// has exactly one entry that does not repeat, and every rank exactly one that leads.
template <class Dims>
MOE_RT_FN int32_t flagged(const int32_t* entries, int k, int num_topk) {
  const int32_t entry = entries[k];
  bool repeats = false, leads = true;
  for_topk<Dims>(num_topk, [&](int j) {
    repeats |= j < k && entries[j] == entry;
    leads &= j >= k || owner_of(entries[j]) != owner_of(entry);
  });
  return entry < 0 ? kNoEntry : entry | (repeats ? kRepeats : 0) | (leads ? kLeads : 0);
}

// Tables that a source reads while it routes: the originals, or a block's copies of them.
struct RoutingTables {
  const int32_t* entries;     // like Placement::entries, without flags
  const int32_t* rank_first;  // like Placement::rank_first
  char* const* base;          // like World::base
  int32_t num_experts;

  MOE_RT_FN static RoutingTables of(const World& w) {
    return {w.placement.entries, w.placement.rank_first, w.base, w.shape.num_experts};
  }
  MOE_RT_FN int32_t entry(int64_t expert) const {
    return expert < 0 || expert >= num_experts ? kNoEntry : entries[expert];
  }
};

}  // namespace moe_rt
