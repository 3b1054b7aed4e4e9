// Receiver's half of routing, after dispatch's wait: from the lists of every source to the start of each block of rows.
//
// Rows are ordered by local expert, source rank, token. A (local expert, source) block starts where the counts of all
// blocks before it end, or at the next multiple of Shape::alignment after another expert's rows, or at a place that
// depends only on the expert (DispatchArgs::expert_rows). Counts are read once, range-checked and kept: no later step
// reads them from a peer again.
#pragma once

#include "../core/coop.h"
#include "../core/plan.h"
#include "../core/tuning.h"

namespace moe_rt {

// Scratch memory shared by the lanes that build the index. After index_blocks each lane's view is ready for gather.
struct Blocks {
  int32_t *start, *spare;            // [L * R] first row of a (local expert, source) block; space for the scan
  int32_t *pull_start, *copy_start;  // [R + 1] first entry of each source in the plan's lists
  int32_t *first_pull, *first_copy;  // [R] first entry for this rank in each source's lists
  int32_t *bad, *full;               // lowest source with implausible lists, lowest rank that would overflow; or R
  int32_t* copies;                   // [R] sum of each source's counts
  int32_t* ends;                     // [L] end of each expert's rows, without the limit of capacity
  bool pushed = false;               // sources have pushed their lists to this rank (pushing.h)
  bool pushed_rows = false;          // sources have pushed their rows as well

  MOE_RT_FN static int64_t num_ints(const Shape& s, int32_t num_local_experts) {
    return int64_t{2} * num_local_experts * s.num_ranks + int64_t{5} * s.num_ranks + 4 + num_local_experts;
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
            lists + 4 * ranks + 3,
            lists + 4 * ranks + 4,
            lists + 5 * ranks + 4};
  }
  MOE_RT_FN int32_t end(int32_t expert, int32_t source, int32_t num_ranks) const {
    return source + 1 < num_ranks ? start[int64_t{expert} * num_ranks + source + 1] : ends[expert];
  }
  // Rows up to the end of a part of recv_x (World::num_parts), without the limit of capacity.
  MOE_RT_FN int64_t part_end(const World& w, int64_t part) const {
    return w.shape.by_token() ? pull_start[part + 1] : w.shape.aligned(ends[part]);
  }
};

// Adds up a source's counts of every step-th expert from `first` on. Returns -1 if one is not plausible.
MOE_RT_FN int64_t sum_of_counts(const World& w, const Blocks& b, int source, int first, int step) {
  const int32_t tokens = b.pushed ? w.shape.num_pushed_tokens : w.shape.num_max_tokens;
  const int32_t num_local = w.num_local_experts(), num_ranks = w.shape.num_ranks;
  int64_t sum = 0;
  bool wrong = false;  // no early exit, which would make every load wait for the one before
  for (int32_t e = first; e < num_local; e += step) {
    const int32_t count = b.start[e * num_ranks + source];
    if (count < 0 || count > tokens) wrong = true;
    sum += count;
  }
  return wrong ? -1 : sum;
}

// True if a source's lists cannot lead this rank out of bounds, so that a crashed or corrupted peer does not corrupt
// it. Called while `pull_start` and `copy_start` still hold the ends of the source's lists; `sum` is that of its counts,
// each of which is plausible.
MOE_RT_FN bool plausible(const World& w, const Blocks& b, int source, int64_t sum) {
  const int64_t tokens = b.pushed ? w.shape.num_pushed_tokens : w.shape.num_max_tokens;
  const int64_t first_pull = b.first_pull[source], end_pull = b.pull_start[source + 1];
  const int64_t first_copy = b.first_copy[source], end_copy = b.copy_start[source + 1];
  const int64_t pulls = end_pull - first_pull, copies = end_copy - first_copy;
  if (first_pull < 0 || end_pull > tokens * w.shape.num_visits()) return false;
  if (first_copy < 0 || end_copy > tokens * w.shape.num_topk) return false;
  if (pulls < 0 || pulls > tokens || copies < pulls) return false;
  return sum == copies;  // hence at most T * min(K, L), the capacity of a plan
}

// Checks the lists of all sources; the lowest that are not plausible is then in b.bad. Every lane calls it after a sync
// and syncs before it reads b.bad. With enough lanes, kLanesOfSource check one source together.
template <class Coop>
MOE_RT_FN void check_sources(const Coop& coop, const World& w, Blocks& b) {
  constexpr int kLanes = tuning::kLanesOfSource;
  const int num_ranks = w.shape.num_ranks;
  const int64_t most = int64_t{w.shape.num_max_tokens} * w.shape.num_topk;
  const Range sources = strided(coop, num_ranks);
  if (coop.size() < kLanes * num_ranks || most > INT32_MAX / kLanes) {  // their sums must fit 32 bits
    for (int64_t s = sources.begin; s < sources.end; s += sources.step) {
      if (!plausible(w, b, int(s), sum_of_counts(w, b, int(s), 0, 1))) fetch_min_relaxed(*b.bad, int32_t(s));
    }
    return;
  }
  if (const int source = coop.rank() / kLanes; source < num_ranks) {
    const int64_t sum = sum_of_counts(w, b, source, coop.rank() % kLanes, kLanes);
    if (sum < 0 || sum > most) fetch_min_relaxed(*b.bad, int32_t(source));
    fetch_add_relaxed(b.copies[source], int32_t(min_of(sum, most)));
  }
  coop.sync();
  for (int64_t s = sources.begin; s < sources.end; s += sources.step) {
    if (!plausible(w, b, int(s), load_relaxed(b.copies[s]))) fetch_min_relaxed(*b.bad, int32_t(s));
  }
}

// Computes the end of each expert's rows. With alignment or expert_rows, first moves each expert's blocks past the
// padding before them.
template <class Coop>
MOE_RT_FN void end_experts(const Coop& coop, const World& w, int32_t num_rows, int64_t expert_rows, Blocks& b) {
  const int32_t num_local = w.num_local_experts(), num_ranks = w.shape.num_ranks;
  const Range experts = strided(coop, num_local);
  for (int64_t e = experts.begin; e < experts.end; e += experts.step) {
    b.ends[e] = e + 1 < num_local ? b.start[(e + 1) * num_ranks] : num_rows;
  }
  coop.sync();
  if (w.shape.alignment == 1 && !expert_rows) return;
  if (coop.rank() == 0) {
    int64_t padding = 0;
    for (int32_t e = 0; e < num_local; ++e) {
      b.spare[e] = int32_t(padding);
      b.ends[e] += int32_t(padding);
      padding += (expert_rows ? (e + 1) * expert_rows : w.shape.aligned(b.ends[e])) - b.ends[e];
    }
  }
  coop.sync();
  const Range blocks = strided(coop, int64_t{num_local} * num_ranks);
  for (int64_t i = blocks.begin; i < blocks.end; i += blocks.step) b.start[i] += b.spare[i / num_ranks];
  coop.sync();
}

// Reads every source's counts and list ends and turns them into starts. Returns the first source whose lists are not
// plausible, or -1, identical on every lane.
template <class Weight, class Coop>
MOE_RT_FN int index_blocks(const Coop& coop, const World& w, int window, int64_t expert_rows, Blocks& b) {
  const int num_ranks = w.shape.num_ranks, me = w.rank, first = w.placement.rank_first[me];
  const int32_t num_blocks = w.num_local_experts() * num_ranks;
  if (coop.rank() == 0) *b.bad = *b.full = num_ranks;
  const Range blocks = strided(coop, num_blocks);
  // A division for every block would take a CPU as long as all its other work for one token.
  int32_t expert = coop.rank() / num_ranks, source = coop.rank() % num_ranks;
  const int32_t next_expert = coop.size() / num_ranks, next_source = coop.size() % num_ranks;
  for (int64_t i = blocks.begin; i < blocks.end; i += blocks.step) {
    b.start[i] = RouteLists<Weight>::received(w, source, window, b.pushed).counts[first + expert];
    const int32_t beyond = source + next_source >= num_ranks ? 1 : 0;
    source += next_source - beyond * num_ranks, expert += next_expert + beyond;
  }
  // The last lanes take these, as the first ones wait for counts.
  for (int s = coop.size() - 1 - coop.rank(); s < num_ranks; s += coop.size()) {
    const auto lists = RouteLists<Weight>::received(w, s, window, b.pushed);
    const int32_t first_pull = lists.pull_offs[me], end_pull = lists.pull_offs[me + 1];
    const int32_t first_copy = lists.copy_offs[me], end_copy = lists.copy_offs[me + 1];
    b.first_pull[s] = first_pull, b.pull_start[s + 1] = end_pull;
    b.first_copy[s] = first_copy, b.copy_start[s + 1] = end_copy;
    b.copies[s] = 0;
  }
  coop.sync();
  check_sources(coop, w, b);
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
  b.spare = scan.sums == b.start ? b.spare : b.start;
  b.start = scan.sums;
  end_experts(coop, w, scan.total, expert_rows, b);
  return -1;
}

MOE_RT_FN int64_t rows_for(const World& w, int window, const Blocks& b, int rank) {
  int64_t rows = 0;
  for (int s = 0; s < w.shape.num_ranks; ++s) {
    const auto lists = RouteLists<float>::received(w, s, window, b.pushed);
    const auto& offs = w.shape.by_token() ? lists.pull_offs : lists.copy_offs;
    rows += int64_t{offs[rank + 1]} - offs[rank];
  }
  return rows;
}

// Rows of a rank's recv_x, from its header of dispatch `seq`: a rank's capacity is not known elsewhere.
MOE_RT_FN int64_t announced_capacity(const World& w, uint64_t seq, int rank) {
  return read_once(w.mailbox(w.rank, Kind::kDispatch, rank).header[seq & 1].capacity);
}

// Number of rows that fit a rank's recv_x however its experts' padding falls.
MOE_RT_FN int64_t room_for_rows(const World& w, uint64_t seq, int rank) {
  return announced_capacity(w, seq, rank) - w.most_padding(rank);
}

// Lowest rank whose recv_x would overflow, or -1: every rank computes the same from what all sources published.
// Requires index_blocks; identical on every lane.
template <class Coop>
MOE_RT_FN int overflowing_rank(const Coop& coop, const World& w, uint64_t seq, int window, const Blocks& b) {
  const Range ranks = strided(coop, w.shape.num_ranks);
  for (int64_t r = ranks.begin; r < ranks.end; r += ranks.step) {
    if (rows_for(w, window, b, int(r)) > room_for_rows(w, seq, int(r))) fetch_min_relaxed(*b.full, int32_t(r));
  }
  coop.sync();
  const int full = load_relaxed(*b.full);
  return full < w.shape.num_ranks ? full : -1;
}

// Number of rows beyond capacity, which are dropped in row order. Padding does not count.
MOE_RT_FN int64_t num_dropped(const World& w, const Blocks& b, int64_t capacity) {
  if (w.shape.alignment == 1) {
    const int64_t rows = b.part_end(w, w.num_parts() - 1);
    return rows - min_of(rows, capacity);
  }
  int64_t dropped = 0;
  for (int32_t e = 0; e < w.num_local_experts(); ++e) {
    const int64_t first = b.start[int64_t{e} * w.shape.num_ranks], kept_end = min_of<int64_t>(b.ends[e], capacity);
    dropped += b.ends[e] - (kept_end > first ? kept_end : first);
  }
  return dropped;
}

// Writes offs, clipped to capacity, the plan's head, and the start of each expert's padding. With expert_rows, offs gets
// the number of each expert's rows.
template <class Coop>
MOE_RT_FN void write_index(const Coop& coop, const World& w, uint64_t seq, int64_t num_tokens, int64_t capacity,
                           int64_t expert_rows, const Blocks& b, int32_t* offs, const RecvPlan& plan) {
  const Range parts = strided(coop, w.num_parts());
  for (int64_t i = parts.begin; i < parts.end; i += parts.step) {
    offs[i] = int32_t(min_of(b.part_end(w, i), capacity) - i * expert_rows);
    if (w.shape.alignment > 1) plan.ends[i] = int32_t(min_of<int64_t>(b.ends[i], capacity));
  }
  if (coop.rank() == 0) {
    const int64_t num_ranks = w.shape.num_ranks, kept = min_of(b.part_end(w, w.num_parts() - 1), capacity);
    const int32_t first_own = b.pull_start[w.rank];
    *plan.head = {w.plan_mark,
                  seq,
                  int32_t(num_tokens),
                  b.pull_start[num_ranks],
                  b.copy_start[num_ranks],
                  int32_t(num_dropped(w, b, capacity)),
                  int32_t(capacity),
                  first_own,
                  b.pull_start[w.rank + 1] - first_own,
                  int32_t(kept)};
  }
}

}  // namespace moe_rt
