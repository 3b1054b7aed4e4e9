// The source's half of routing for many lanes: the lists of routing.h for one destination rank, tile after tile.
//
// A tile has one token per lane. Which tokens of the tile visit an expert is a set of bits, so a token's place among
// them is a count of the bits before its own: stable whatever the order in which lanes set them. Destinations are
// independent, each made by a block of its own, which counts what goes to the ranks before it and waits for no other.
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"

namespace moe_rt {

// Scratch of the lanes that route together.
struct Tiles {
  uint32_t* bits;        // [num_local][words] which lanes' tokens visit the expert
  int32_t* rows;         // [num_local] rows of the tiles before
  int32_t *sums, *next;  // [tile] packed counts of each token, and room for scanning
  int32_t* before;       // [2] pulls and copies for the ranks before the destination
  int32_t tile;          // tokens of a tile, at most one per lane

  MOE_RT_FN static int32_t words(int32_t tile) { return (tile + 31) / 32; }
  MOE_RT_FN static int64_t num_ints(int32_t tile, int32_t num_local) {
    return int64_t{num_local} * (words(tile) + 1) + 2 * tile + 2;
  }
  MOE_RT_FN static Tiles view(int32_t* ints, int32_t tile, int32_t num_local) {
    int32_t* const rows = ints + int64_t{num_local} * words(tile);
    int32_t* const sums = rows + num_local;
    return {reinterpret_cast<uint32_t*>(ints), rows, sums, sums + tile, sums + 2 * tile, tile};
  }
};

// A token's entries, decoded: place and owner of each, -1 for none; `first` is false for a repeated expert.
template <class Dims>
struct Entries {
  int32_t place[Dims::kTopkBound], owner[Dims::kTopkBound];
  bool first[Dims::kTopkBound];
};

// A bad expert id counts as none; the lowest of all is left in bad_entry, as an index into topk_idx.
template <class Dims>
MOE_RT_FN void decode(const Dims& dims, const World& w, const ExpertIds& topk_idx, int64_t token, Entries<Dims>& out,
                      int64_t& bad_entry) {
  for_topk<Dims>(dims.num_topk(), [&](int k) {
    const int64_t at = token * dims.num_topk() + k, expert = topk_idx[at];
    out.place[k] = out.owner[k] = -1;
    if (expert < -1 || expert >= w.shape.num_experts) {
      fetch_min_relaxed(bad_entry, at);
    } else if (expert >= 0) {
      out.place[k] = w.placement.position[expert];
      out.owner[k] = w.placement.owner[out.place[k]];
    }
    out.first[k] = out.place[k] >= 0;
    for_topk<Dims>(dims.num_topk(), [&](int j) {
      if (j < k && out.place[j] == out.place[k]) out.first[k] = false;
    });
  });
}

// The token's distinct ranks below `rank`: the slot where a partial from `rank` comes back.
template <class Dims>
MOE_RT_FN int ranks_below(const Dims& dims, const Entries<Dims>& e, int rank) {
  int n = 0;
  for_topk<Dims>(dims.num_topk(), [&](int k) {
    bool counts = e.owner[k] >= 0 && e.owner[k] < rank;
    for_topk<Dims>(dims.num_topk(), [&](int j) {
      if (j < k && e.owner[j] == e.owner[k]) counts = false;
    });
    n += counts;
  });
  return n;
}

// Leaves in tiles.before how many pulls and copies all tokens send to the ranks before `dest`.
template <class Coop, class Dims>
MOE_RT_FN void count_before(const Coop& coop, const Dims& dims, const World& w, int dest, const ExpertIds& topk_idx,
                            int64_t num_tokens, const Tiles& tiles, int64_t& bad_entry) {
  int32_t pulls = 0, copies = 0;
  Entries<Dims> e;
  const Range tokens = strided(coop, dest == 0 ? 0 : num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t += tokens.step) {
    decode(dims, w, topk_idx, t, e, bad_entry);
    pulls += ranks_below(dims, e, dest);
    for_topk<Dims>(dims.num_topk(), [&](int k) { copies += e.first[k] && e.owner[k] < dest; });
  }
  if (pulls == 0) return;
  fetch_add_relaxed(tiles.before[0], pulls);
  fetch_add_relaxed(tiles.before[1], copies);
}

// Writes one token's pull, copies, weights and send_plan entries for `dest`. `lane` is its place in the tile.
template <class Dims, class Weight>
MOE_RT_FN void write_token(const Dims& dims, const World& w, int dest, int64_t token, const Entries<Dims>& e, int lane,
                           const Tiles& tiles, const Weight* topk_weights, int32_t pull_at, const Pull& pull,
                           const RouteLists<Weight>& lists, int32_t* send_plan) {
  const int num_topk = dims.num_topk(), first_place = w.placement.rank_first[dest];
  const int32_t words = Tiles::words(tiles.tile);
  lists.pulls[pull_at] = pull;
  for_topk<Dims>(num_topk, [&](int k) {
    if (e.owner[k] != dest) return;
    int first_k = k, before = 0;
    Weight weight = 0;
    for_topk<Dims>(num_topk, [&](int j) {
      if (e.place[j] == e.place[k]) {  // duplicates become one row, weights added
        first_k = j < first_k ? j : first_k;
        weight += topk_weights[token * num_topk + j];
      }
      before += e.first[j] && e.owner[j] == dest && e.place[j] < e.place[k];
    });
    send_plan[token * num_topk + k] = send_entry(pull.slot, first_k);
    if (!e.first[k]) return;
    const int32_t expert = e.place[k] - first_place;
    const uint32_t* bits = tiles.bits + int64_t{expert} * words;
    int32_t index = tiles.rows[expert] + popcount(bits[lane / 32] & ((1u << lane % 32) - 1));
    for (int word = 0; word < lane / 32; ++word) index += popcount(bits[word]);
    lists.copies[pull.first + before] = {expert, index, k, 0};
    lists.weights[pull.first + before] = weight;
  });
}

// All of one destination's lists, and its entries of send_plan; destination 0 also marks those that go nowhere. Ends
// out of step: callers sync before they announce.
template <class Coop, class Dims, class Weight>
MOE_RT_FN void route_to(const Coop& coop, const Dims& dims, const World& w, int dest, const ExpertIds& topk_idx,
                        const Weight* topk_weights, int64_t num_tokens, const Tiles& tiles,
                        const RouteLists<Weight>& lists, int32_t* send_plan, int64_t& bad_entry) {
  constexpr int kPullShift = 20;  // a tile has at most 2^10 tokens of at most 2^7 copies
  const int first_place = w.placement.rank_first[dest], num_local = w.placement.rank_first[dest + 1] - first_place;
  const int32_t words = Tiles::words(tiles.tile), lane = coop.rank();
  const Range experts = strided(coop, num_local), all_words = strided(coop, int64_t{num_local} * words);
  for (int64_t i = all_words.begin; i < all_words.end; i += all_words.step) tiles.bits[i] = 0;
  for (int64_t i = experts.begin; i < experts.end; i += experts.step) tiles.rows[i] = 0;
  if (lane == 0) tiles.before[0] = tiles.before[1] = 0;
  coop.sync();
  count_before(coop, dims, w, dest, topk_idx, num_tokens, tiles, bad_entry);
  coop.sync();
  int32_t pulls = load_relaxed(tiles.before[0]), copies = load_relaxed(tiles.before[1]);
  if (lane == 0) lists.pull_offs[dest] = pulls, lists.copy_offs[dest] = copies;

  Entries<Dims> e;
  for (int64_t start = 0; start < num_tokens; start += tiles.tile) {
    const int32_t in_tile = int32_t(smaller<int64_t>(tiles.tile, num_tokens - start));
    const int64_t token = start + lane;
    int32_t num_copies = 0;
    if (lane < in_tile) {
      decode(dims, w, topk_idx, token, e, bad_entry);
      for_topk<Dims>(dims.num_topk(), [&](int k) {
        if (dest == 0 && e.owner[k] < 0) send_plan[token * dims.num_topk() + k] = kNowhere;
        if (!e.first[k] || e.owner[k] != dest) return;
        ++num_copies;
        fetch_or_relaxed(tiles.bits[int64_t{e.place[k] - first_place} * words + lane / 32], 1u << lane % 32);
      });
      tiles.sums[lane] = int32_t{num_copies > 0} << kPullShift | num_copies;
    }
    coop.sync();
    const Scan scan = exclusive_scan(coop, tiles.sums, tiles.next, in_tile);
    constexpr int32_t kCopies = (1 << kPullShift) - 1;
    if (num_copies > 0) {
      const int32_t before = scan.sums[lane];
      const Pull pull{int32_t(token), ranks_below(dims, e, dest), copies + (before & kCopies), num_copies};
      write_token(dims, w, dest, token, e, lane, tiles, topk_weights, pulls + (before >> kPullShift), pull, lists,
                  send_plan);
    }
    coop.sync();
    for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
      for (int word = 0; word < words; ++word) {
        tiles.rows[i] += popcount(tiles.bits[i * words + word]);
        tiles.bits[i * words + word] = 0;
      }
    }
    pulls += scan.total >> kPullShift;
    copies += scan.total & kCopies;
    coop.sync();
  }
  for (int64_t i = experts.begin; i < experts.end; i += experts.step) lists.counts[first_place + i] = tiles.rows[i];
  if (dest == w.shape.num_ranks - 1 && lane == 0) lists.pull_offs[dest + 1] = pulls, lists.copy_offs[dest + 1] = copies;
}

}  // namespace moe_rt
