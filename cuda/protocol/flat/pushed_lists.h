// Lists of small batches, written to where they are read: a receiver then goes to a peer's memory for rows alone.
//
// A receiver that reads lists where their source keeps them waits for a peer three times before it knows which rows to
// read: for the counts, an entry of the pulls, its copies. With few tokens that takes longer than moving the rows. So
// each segment has room for the lists of small batches from every source, and sources copy there what they have made in
// their own windows, before they announce. Such a batch is known by its bound, which ranks compare: all choose alike.
#pragma once

#include "../core/coop.h"
#include "../core/plan.h"

namespace moe_rt {

// Of a dispatch whose ranks send at most so many tokens each. Ranks that are not mapped fetch lists (device/rdma.h).
MOE_RT_FN bool pushes_lists(const World& w, int64_t max_tokens) {
  return w.mirror == nullptr && max_tokens <= w.shape.num_pushed_tokens;
}

// The rank to which the i-th entry of a list goes. It is one even if a peer has overwritten the offsets.
MOE_RT_FN int receiver_of(const int32_t* offs, int32_t num_ranks, int32_t i) {
  int lowest = 0, highest = num_ranks - 1;
  while (lowest < highest) {
    const int middle = (lowest + highest) / 2;
    if (i < offs[middle + 1]) {
      highest = middle;
    } else {
      lowest = middle + 1;
    }
  }
  return lowest;
}

// All lanes together, once the lists are complete; callers sync before they announce.
template <class Weight, class Coop>
MOE_RT_FN void push_lists(const Coop& coop, const World& w, int window) {
  const Shape& s = w.shape;
  const auto own = RouteLists<Weight>::view(w, w.rank, window);
  const auto at = [&](int64_t receiver) { return RouteLists<Weight>::pushed(w, int(receiver), w.rank, window); };
  const Range experts = strided(coop, s.num_experts), ends = strided(coop, int64_t{s.num_ranks} * (s.num_ranks + 1));
  for (int64_t i = experts.begin; i < experts.end; i += experts.step) {
    at(w.placement.owner[i]).counts[i] = own.counts[i];
  }
  for (int64_t i = ends.begin; i < ends.end; i += ends.step) {
    const int64_t receiver = i / (s.num_ranks + 1), end = i % (s.num_ranks + 1);
    at(receiver).pull_offs[end] = own.pull_offs[end];
    at(receiver).copy_offs[end] = own.copy_offs[end];
  }
  const int64_t tokens = s.num_pushed_tokens;
  const Range pulls = strided(coop, smaller<int64_t>(own.pull_offs[s.num_ranks], tokens * s.num_slots()));
  for (int64_t i = pulls.begin; i < pulls.end; i += pulls.step) {
    at(receiver_of(own.pull_offs, s.num_ranks, int32_t(i))).pulls[i] = own.pulls[i];
  }
  const Range copies = strided(coop, smaller<int64_t>(own.copy_offs[s.num_ranks], tokens * s.num_topk));
  for (int64_t i = copies.begin; i < copies.end; i += copies.step) {
    const auto there = at(receiver_of(own.copy_offs, s.num_ranks, int32_t(i)));
    there.copies[i] = own.copies[i];
    there.weights[i] = own.weights[i];
  }
}

}  // namespace moe_rt
