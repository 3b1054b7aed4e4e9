// The source's half of routing for few lanes: from topk_idx to a stable list of pulls per destination rank, written
// into its window. routing_tiles.h makes the same lists with a GPU's many lanes.
//
// Two passes over the tokens. The first counts, per lane, the rows for each expert and the pulls for each rank; a
// prefix sum over lanes gives every lane its places; the second writes the lists. Lanes own contiguous tokens, so the
// lists are in token order whatever the number of lanes: row order at the destination (expert, source, token) is
// deterministic.
#pragma once

#include "coop.h"
#include "dims.h"
#include "plan.h"

namespace moe_rt {

// One entry of a token's top-k in placement order; ties keep top-k order, so a duplicate follows its first.
struct Visit {
  int32_t place, k;
};

// Lists a token's visits in placement order; -1 entries are left out. Returns their number, or -1 on a bad expert id,
// stored in *bad.
template <class Dims>
MOE_RT_FN int sorted_visits(const Dims& dims, const World& w, const int64_t* topk_idx, Visit* out, int64_t* bad) {
  int n = 0;
  for (int k = 0; k < dims.num_topk(); ++k) {
    const int64_t expert = topk_idx[k];
    if (expert == -1) continue;
    if (expert < -1 || expert >= w.shape.num_experts) {
      *bad = expert;
      return -1;
    }
    const Visit v{w.placement.position[expert], k};
    int i = n++;
    for (; i > 0 && out[i - 1].place > v.place; --i) out[i] = out[i - 1];
    out[i] = v;
  }
  return n;
}

// Per-lane counters, [lanes][E + R]: rows for each place, pulls for each rank. After place_lanes: where the lane
// starts.
struct LaneCounters {
  int32_t* data;
  int32_t num_places, num_ranks;
  MOE_RT_FN int32_t* rows(int lane) const { return data + int64_t{lane} * (num_places + num_ranks); }
  MOE_RT_FN int32_t* pulls(int lane) const { return rows(lane) + num_places; }
  MOE_RT_FN static int64_t num_ints(const Shape& s, int lanes) {
    return int64_t{lanes} * (s.num_experts + s.num_ranks);
  }
};

// First pass. Returns the first bad expert id of this lane's tokens in *bad and false.
template <class Coop, class Dims>
MOE_RT_FN bool count_visits(const Coop& coop, const Dims& dims, const World& w, const int64_t* topk_idx,
                            int64_t num_tokens, const LaneCounters& counters, int64_t* bad) {
  int32_t* rows = counters.rows(coop.rank());
  int32_t* pulls = counters.pulls(coop.rank());
  for (int i = 0; i < counters.num_places; ++i) rows[i] = 0;
  for (int r = 0; r < counters.num_ranks; ++r) pulls[r] = 0;
  Visit visits[Dims::kTopkBound];
  const Range tokens = coop.chunk(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const int n = sorted_visits(dims, w, topk_idx + t * dims.num_topk(), visits, bad);
    if (n < 0) return false;
    for (int i = 0; i < n; ++i) {
      if (i > 0 && visits[i].place == visits[i - 1].place) continue;
      ++rows[visits[i].place];
      const int owner = w.placement.owner[visits[i].place];
      if (i == 0 || w.placement.owner[visits[i - 1].place] != owner) ++pulls[owner];
    }
  }
  return true;
}

// Turns counters into starting places and writes the totals that receivers read. One lane's work; callers sync around
// it.
template <class Weight>
MOE_RT_FN void place_lanes(const World& w, const LaneCounters& counters, int lanes, const RouteLists<Weight>& lists) {
  for (int place = 0; place < counters.num_places; ++place) {
    int32_t total = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      int32_t& slot = counters.rows(lane)[place];
      const int32_t mine = slot;
      slot = total;
      total += mine;
    }
    lists.counts[place] = total;
  }
  int32_t pulls = 0, copies = 0;
  for (int r = 0; r < counters.num_ranks; ++r) {
    lists.pull_offs[r] = pulls;
    lists.copy_offs[r] = copies;
    for (int lane = 0; lane < lanes; ++lane) {
      int32_t& slot = counters.pulls(lane)[r];
      const int32_t mine = slot;
      slot = pulls;
      pulls += mine;
    }
    for (int i = w.placement.rank_first[r]; i < w.placement.rank_first[r + 1]; ++i) copies += lists.counts[i];
  }
  lists.pull_offs[counters.num_ranks] = pulls;
  lists.copy_offs[counters.num_ranks] = copies;
}

// Where this lane's first copy for `rank` goes: everything that earlier lanes send to the same rank comes before it.
MOE_RT_FN int32_t first_copy(const World& w, const LaneCounters& counters, int lane, int rank, int32_t rank_offset) {
  for (int i = w.placement.rank_first[rank]; i < w.placement.rank_first[rank + 1]; ++i) {
    rank_offset += counters.rows(lane)[i];
  }
  return rank_offset;
}

// Second pass: writes pulls, copies and weights of this lane's tokens, and send_plan. `copy_cursor` is [R] of scratch.
template <class Coop, class Dims, class Weight>
MOE_RT_FN void write_lists(const Coop& coop, const Dims& dims, const World& w, const int64_t* topk_idx,
                           const Weight* topk_weights, int64_t num_tokens, const LaneCounters& counters,
                           int32_t* copy_cursor, const RouteLists<Weight>& lists, int32_t* send_plan) {
  int32_t* rows = counters.rows(coop.rank());
  int32_t* pulls = counters.pulls(coop.rank());
  for (int r = 0; r < w.shape.num_ranks; ++r) {
    copy_cursor[r] = first_copy(w, counters, coop.rank(), r, lists.copy_offs[r]);
  }
  Visit visits[Dims::kTopkBound];
  int64_t unused;
  const Range tokens = coop.chunk(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const int64_t base = t * dims.num_topk();
    for (int k = 0; k < dims.num_topk(); ++k) send_plan[base + k] = kNowhere;
    const int n = sorted_visits(dims, w, topk_idx + base, visits, &unused);
    Pull* pull = nullptr;
    int slot = -1, owner = -1, first_k = 0;
    for (int i = 0; i < n; ++i) {
      const Visit v = visits[i];
      const Weight weight = topk_weights[base + v.k];
      if (i > 0 && visits[i - 1].place == v.place) {  // a duplicate expert: one row, weights added
        lists.weights[copy_cursor[owner] - 1] += weight;
      } else {
        if (w.placement.owner[v.place] != owner) {
          owner = w.placement.owner[v.place];
          pull = &lists.pulls[pulls[owner]++];
          *pull = {int32_t(t), ++slot, copy_cursor[owner], 0};
        }
        const int32_t at = copy_cursor[owner]++;
        lists.copies[at] = {v.place - w.placement.rank_first[owner], rows[v.place]++, v.k, 0};
        lists.weights[at] = weight;
        ++pull->copies;
        first_k = v.k;
      }
      send_plan[base + v.k] = send_entry(slot, first_k);
    }
  }
}

}  // namespace moe_rt
