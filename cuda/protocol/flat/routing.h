// Source's half of routing for few lanes, before dispatch announces: from topk_idx to a stable list of pulls per
// destination rank, written into the source's window. routing_tiles.h builds the same lists with a GPU's many lanes.
//
// Routing makes two passes over the tokens. The first sorts each token's experts and counts, per lane, the rows for
// each expert and the pulls for each rank. A prefix sum over lanes then gives every lane its places, and the second
// pass writes the lists. Lanes own contiguous tokens, so the lists are in token order for any number of lanes, and row
// order at the destination (expert, source, token) is deterministic. A branch predictor cannot guess which experts a
// token chose, so the only branches on that are for duplicates and entries of -1, which are rare. `Ids` is ExpertIds,
// or a pointer to ids of one width.
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"
#include "../two_level/node_slots.h"

namespace moe_rt {

inline constexpr int32_t kNoPlace = INT32_MAX;  // place of topk_idx -1: sorts last

// Sorts a token's n top-k entries, starting at `first`, by place: order[i] is the k of the i-th one, ties in top-k
// order, so that a duplicate follows its first; places[k] is the place of entry k. False on a bad expert id, which is
// stored in *bad. Each entry counts the entries before it (Knuth, The Art of Computer Programming 3, 5.2, comparison
// counting). `kTopk` is n if it is known at compile time, else 0.
template <int kTopk, class Ids>
MOE_RT_FN bool sort_visits(const World& w, const Ids& topk_idx, int64_t first, int n, int32_t* places, int32_t* order,
                           int64_t* bad) {
  constexpr int kBound = kTopk ? kTopk : kMaxTopk;
  int32_t before[kBound] = {};
  if (kTopk) n = kTopk;
  for (int k = 0; k < n; ++k) {
    const int64_t expert = topk_idx[first + k];
    if (expert < -1 || expert >= w.shape.num_experts) {
      *bad = expert;
      return false;
    }
    places[k] = expert == -1 ? kNoPlace : w.placement.position[expert];
  }
  for (int k = 1; k < n; ++k) {
    for (int j = 0; j < k; ++j) {
      const int32_t first = places[j] <= places[k];
      before[k] += first;
      before[j] += 1 - first;
    }
  }
  for (int k = 0; k < n; ++k) order[before[k]] = k;
  return true;
}

// Per-lane counters, [lanes][E + 2R]: rows for each place, pulls and copies for each rank. place_lanes replaces them by
// each lane's starts. They are in private memory, because peers can write the lists and routing must not follow those.
struct LaneCounters {
  int32_t* data;
  int32_t num_places, num_ranks;
  MOE_RT_FN int32_t* rows(int lane) const { return data + int64_t{lane} * (num_places + 2 * num_ranks); }
  MOE_RT_FN int32_t* pulls(int lane) const { return rows(lane) + num_places; }
  MOE_RT_FN int32_t* copies(int lane) const { return pulls(lane) + num_ranks; }
  MOE_RT_FN static int64_t num_ints(const Shape& s, int lanes) {
    return int64_t{lanes} * (s.num_experts + 2 * s.num_ranks);
  }
};

// First pass. Writes each token's entries, in the order of their places, to its row of send_plan. On a bad expert id
// stores the first of this lane's tokens in *bad and returns false.
template <class Coop, class Dims, class Ids>
MOE_RT_FN bool count_visits(const Coop& coop, const Dims& dims, const World& w, const Ids& topk_idx, int64_t num_tokens,
                            const LaneCounters& counters, int32_t* send_plan, int64_t* bad) {
  int32_t* rows = counters.rows(coop.rank());
  int32_t* pulls = counters.pulls(coop.rank());
  for (int i = 0; i < counters.num_places; ++i) rows[i] = 0;
  for (int r = 0; r < counters.num_ranks; ++r) pulls[r] = 0;
  const int topk = dims.num_topk();
  const auto sort = topk == 2   ? sort_visits<2, Ids>
                    : topk == 4 ? sort_visits<4, Ids>
                    : topk == 6 ? sort_visits<6, Ids>
                    : topk == 8 ? sort_visits<8, Ids>
                                : sort_visits<0, Ids>;
  int32_t places[Dims::kTopkBound];
  const Range tokens = coop.chunk(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    int32_t* order = send_plan + t * topk;
    if (!sort(w, topk_idx, t * topk, topk, places, order, bad)) return false;
    int32_t last_place = kNoPlace, last_owner = -1;
    for (int i = 0; i < topk; ++i) {
      const int32_t place = places[order[i]];
      if (place == kNoPlace) break;
      if (place == last_place) continue;
      const int32_t owner = w.placement.owner[place];
      ++rows[place];
      pulls[owner] += owner != last_owner;
      last_place = place, last_owner = owner;
    }
  }
  return true;
}

// Turns one counter of each lane into that lane's start, from `start` on. Returns the end of the last lane.
template <class CounterOf>
MOE_RT_FN int32_t start_lanes(int lanes, int32_t start, CounterOf&& counter_of) {
  for (int lane = 0; lane < lanes; ++lane) {
    int32_t& counter = counter_of(lane);
    const int32_t mine = counter;
    counter = start;
    start += mine;
  }
  return start;
}

// Turns counters into starts and writes the totals that receivers read. One lane calls it; callers sync around it.
template <class Weight>
MOE_RT_FN void place_lanes(const World& w, const LaneCounters& counters, int lanes, const RouteLists<Weight>& lists) {
  int32_t pulls = 0, copies = 0;
  for (int r = 0; r < counters.num_ranks; ++r) {
    lists.pull_offs.put(r, pulls);
    lists.copy_offs.put(r, copies);
    for (int lane = 0; lane < lanes; ++lane) counters.copies(lane)[r] = copies;
    for (int i = w.placement.rank_first[r]; i < w.placement.rank_first[r + 1]; ++i) {
      const int32_t rows = start_lanes(lanes, 0, [&](int lane) -> int32_t& { return counters.rows(lane)[i]; });
      lists.counts.put(i, rows);
      for (int lane = 0; lane < lanes; ++lane) counters.copies(lane)[r] += counters.rows(lane)[i];
      copies += rows;
    }
    pulls = start_lanes(lanes, pulls, [&](int lane) -> int32_t& { return counters.pulls(lane)[r]; });
  }
  lists.pull_offs.put(counters.num_ranks, pulls);
  lists.copy_offs.put(counters.num_ranks, copies);
}

// Second pass: writes pulls, copies and weights of this lane's tokens, and send_plan.
template <class Coop, class Dims, class Ids, class Weight>
MOE_RT_FN void write_lists(const Coop& coop, const Dims& dims, const World& w, const Ids& topk_idx,
                           const Weight* topk_weights, int64_t num_tokens, const LaneCounters& counters,
                           const RouteLists<Weight>& lists, int32_t* send_plan) {
  int32_t* const rows = counters.rows(coop.rank());
  int32_t* const pulls = counters.pulls(coop.rank());
  int32_t* const copies = counters.copies(coop.rank());
  int32_t order[Dims::kTopkBound];
  NodeSlots<Dims> node_slots(w);
  const Range tokens = coop.chunk(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    node_slots.begin_token();
    const int64_t base = t * dims.num_topk();
    for (int i = 0; i < dims.num_topk(); ++i) order[i] = send_plan[base + i];
    Pull pull{int32_t(t), -1, 0, 0};
    int32_t last_place = kNoPlace, last_owner = -1, first_k = 0;
    Weight sum = 0;  // weight of the last copy
    for (int i = 0; i < dims.num_topk(); ++i) {
      const int32_t k = order[i];
      const int64_t expert = topk_idx[base + k];
      if (expert < 0 || expert >= w.shape.num_experts) {  // none, or changed since the first pass
        send_plan[base + k] = kNowhere;
        continue;
      }
      const Weight weight = topk_weights[base + k];
      const int32_t place = w.placement.position[expert];
      if (place == last_place) {  // a duplicate expert: one row, weights added
        sum += weight;
        lists.weights.put(copies[last_owner] - 1, sum);
      } else {
        const int32_t owner = w.placement.owner[place], at = copies[owner]++;
        const int32_t next = owner != last_owner;  // one pull per rank, rewritten with every copy
        pull.slot = node_slots.slot_of(owner, next, pull.slot);
        pull.first = next ? at : pull.first;
        pull.copies = next ? 1 : pull.copies + 1;
        pulls[owner] += next;
        lists.pulls.put(pulls[owner] - 1, pull);
        lists.copies.put(at, {place - w.placement.rank_first[owner], rows[place]++, k, 0});
        lists.weights.put(at, sum = weight);
        last_place = place, last_owner = owner, first_k = k;
      }
      send_plan[base + k] = send_entry(node_slots.slot_at_home(last_owner, pull.slot), first_k);
    }
  }
}

}  // namespace moe_rt
