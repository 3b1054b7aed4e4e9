// The receiver's half of routing: from what every source lists for this rank to where each block of rows starts.
//
// Rows come in the order local expert, source rank, token, so a (local expert, source) block starts where the counts of
// all blocks before it end. Counts are read once, range-checked and kept: no later step asks a peer for them again.
#pragma once

#include "../core/coop.h"
#include "../core/plan.h"

namespace moe_rt {

// Scratch of the lanes that index together. After index_blocks each lane's view is ready for gather.
struct Blocks {
  int32_t *start, *spare;            // [L * R] first row of a (local expert, source) block; room for scanning
  int32_t *pull_start, *copy_start;  // [R + 1] where a source's entries begin in the plan's lists
  int32_t *first_pull, *first_copy;  // [R] where the entries for this rank begin in the source's lists
  int32_t *bad, *full;               // lowest source that cannot be believed, lowest rank that would overflow; or R
  int32_t num_rows = 0;              // for experts, with those beyond capacity

  MOE_RT_FN static int64_t num_ints(const Shape& s, int32_t num_local_experts) {
    return int64_t{2} * num_local_experts * s.num_ranks + int64_t{4} * s.num_ranks + 4;
  }
  MOE_RT_FN static Blocks view(int32_t* ints, const Shape& s, int32_t num_local_experts) {
    const int64_t blocks = int64_t{num_local_experts} * s.num_ranks, ranks = s.num_ranks;
    int32_t* const lists = ints + 2 * blocks;
    return {ints,
            ints + blocks,
            lists,
            lists + ranks + 1,
            lists + 2 * ranks + 2,
            lists + 3 * ranks + 2,
            lists + 4 * ranks + 2,
            lists + 4 * ranks + 3};
  }
  MOE_RT_FN int32_t end(int64_t block, int64_t num_blocks) const {
    return block + 1 < num_blocks ? start[block + 1] : num_rows;
  }
  // Rows up to the end of a part of recv_x (World::num_parts), as if there were room for all.
  MOE_RT_FN int32_t part_end(const World& w, int64_t part) const {
    const int64_t num_ranks = w.shape.num_ranks, num_local = w.num_local_experts();
    return w.shape.by_token() ? pull_start[part + 1] : end((part + 1) * num_ranks - 1, num_local * num_ranks);
  }
};

// True when a source's lists cannot lead us out of bounds: a crashed or corrupted peer must not corrupt us. Called when
// `start` still holds counts and `pull_start`, `copy_start` the ends of the source's lists.
MOE_RT_FN bool plausible(const World& w, const Blocks& b, int source) {
  const int64_t tokens = w.shape.num_max_tokens, num_ranks = w.shape.num_ranks;
  const int64_t first_pull = b.first_pull[source], end_pull = b.pull_start[source + 1];
  const int64_t first_copy = b.first_copy[source], end_copy = b.copy_start[source + 1];
  const int64_t pulls = end_pull - first_pull, copies = end_copy - first_copy;
  if (first_pull < 0 || end_pull > tokens * w.shape.num_slots()) return false;
  if (first_copy < 0 || end_copy > tokens * w.shape.num_topk) return false;
  if (pulls < 0 || pulls > tokens || copies < pulls) return false;
  int64_t sum = 0;
  for (int e = 0; e < w.num_local_experts(); ++e) {
    const int32_t count = b.start[e * num_ranks + source];
    if (count < 0 || count > tokens) return false;
    sum += count;
  }
  return sum == copies;  // so at most T * min(K, L), for which a plan has room
}

// Reads every source's counts and list ends and turns them into starts. Returns the first source whose lists are not
// plausible, or -1; the same on every lane.
template <class Weight, class Coop>
MOE_RT_FN int index_blocks(const Coop& coop, const World& w, int window, Blocks& b) {
  const int num_ranks = w.shape.num_ranks, me = w.rank, first = w.placement.rank_first[me];
  const int32_t num_blocks = w.num_local_experts() * num_ranks;
  if (coop.rank() == 0) *b.bad = *b.full = num_ranks;
  const Range blocks = strided(coop, num_blocks), sources = strided(coop, num_ranks);
  for (int64_t i = blocks.begin; i < blocks.end; i += blocks.step) {
    b.start[i] = RouteLists<Weight>::view(w, int(i % num_ranks), window).counts[first + i / num_ranks];
  }
  for (int64_t s = sources.begin; s < sources.end; s += sources.step) {
    const auto lists = RouteLists<Weight>::view(w, int(s), window);
    b.first_pull[s] = lists.pull_offs[me], b.pull_start[s + 1] = lists.pull_offs[me + 1];
    b.first_copy[s] = lists.copy_offs[me], b.copy_start[s + 1] = lists.copy_offs[me + 1];
  }
  coop.sync();
  for (int64_t s = sources.begin; s < sources.end; s += sources.step) {
    if (!plausible(w, b, int(s))) fetch_min_relaxed(*b.bad, int32_t(s));
  }
  coop.sync();
  if (const int bad = load_relaxed(*b.bad); bad < num_ranks) return bad;
  if (coop.rank() == 0) {
    b.pull_start[0] = b.copy_start[0] = 0;
    for (int s = 0; s < num_ranks; ++s) {
      b.pull_start[s + 1] += b.pull_start[s] - b.first_pull[s];
      b.copy_start[s + 1] += b.copy_start[s] - b.first_copy[s];
    }
  }
  const Scan scan = exclusive_scan(coop, b.start, b.spare, num_blocks);
  b.start = scan.sums;
  b.num_rows = scan.total;
  return -1;
}

MOE_RT_FN int64_t rows_for(const World& w, int window, int rank) {
  int64_t rows = 0;
  for (int s = 0; s < w.shape.num_ranks; ++s) {
    const auto lists = RouteLists<float>::view(w, s, window);
    const int32_t* offs = w.shape.by_token() ? lists.pull_offs : lists.copy_offs;
    rows += int64_t{offs[rank + 1]} - offs[rank];
  }
  return rows;
}

// Rows of a rank's recv_x, as it has announced with dispatch `seq`: each knows its own alone.
MOE_RT_FN int64_t announced_capacity(const World& w, uint64_t seq, int rank) {
  return w.mailbox(w.rank, Kind::kDispatch, rank).header[seq & 1].capacity;
}

// The lowest rank whose recv_x would overflow, or -1: every rank computes the same from what all sources published.
// After index_blocks; the same on every lane.
template <class Coop>
MOE_RT_FN int overflowing_rank(const Coop& coop, const World& w, uint64_t seq, int window, const Blocks& b) {
  const Range ranks = strided(coop, w.shape.num_ranks);
  for (int64_t r = ranks.begin; r < ranks.end; r += ranks.step) {
    if (rows_for(w, window, int(r)) > announced_capacity(w, seq, int(r))) fetch_min_relaxed(*b.full, int32_t(r));
  }
  coop.sync();
  const int full = load_relaxed(*b.full);
  return full < w.shape.num_ranks ? full : -1;
}

// offs, clipped to capacity, and the plan's head. Rows beyond capacity are dropped in row order.
template <class Coop>
MOE_RT_FN void write_index(const Coop& coop, const World& w, uint64_t seq, int64_t num_tokens, int64_t capacity,
                           const Blocks& b, int32_t* offs, RecvPlan::Head* head) {
  const Range parts = strided(coop, w.num_parts());
  for (int64_t i = parts.begin; i < parts.end; i += parts.step) {
    offs[i] = int32_t(smaller<int64_t>(b.part_end(w, i), capacity));
  }
  if (coop.rank() == 0) {
    const int64_t num_ranks = w.shape.num_ranks, rows = b.part_end(w, w.num_parts() - 1);
    const int64_t kept = smaller(rows, capacity);
    const int32_t first_own = b.pull_start[w.rank];
    *head = {w.plan_mark,
             seq,
             int32_t(num_tokens),
             b.pull_start[num_ranks],
             b.copy_start[num_ranks],
             int32_t(rows - kept),
             int32_t(capacity),
             first_own,
             b.pull_start[w.rank + 1] - first_own,
             int32_t(kept)};
  }
}

}  // namespace moe_rt
