// Copies the lists in a peer's window to where each rank reads pushed lists: the peers of these programs route as CPU
// ranks, which push nothing.
#pragma once

#include <algorithm>

#include "../../cuda/protocol/flat/pushing.h"

namespace moe_rt {

template <class Weight>
void push_lists(const World& w, int window) {
  const Shape& s = w.shape;
  const auto own = RouteLists<Weight>::view(w, w.rank, window);
  for (int receiver = 0; receiver < s.num_ranks; ++receiver) {
    const auto there = ListsFor<Weight>{w, w.base, window, true}(receiver);
    std::copy_n(own.counts.start, s.num_experts, there.counts.start);
    std::copy_n(own.pull_offs.start, s.num_ranks + 1, there.pull_offs.start);
    std::copy_n(own.copy_offs.start, s.num_ranks + 1, there.copy_offs.start);
    std::copy_n(own.pulls.start, own.pull_offs[s.num_ranks], there.pulls.start);
    std::copy_n(own.copies.start, own.copy_offs[s.num_ranks], there.copies.start);
    std::copy_n(own.weights.start, own.copy_offs[s.num_ranks], there.weights.start);
  }
}

}  // namespace moe_rt
