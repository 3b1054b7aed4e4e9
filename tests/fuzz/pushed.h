// Lists that a peer has made in its own window, copied to where each rank reads pushed ones: peers of these programs
// route as a CPU does, which pushes nothing.
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
    std::copy_n(own.counts, s.num_experts, there.counts);
    std::copy_n(own.pull_offs, s.num_ranks + 1, there.pull_offs);
    std::copy_n(own.copy_offs, s.num_ranks + 1, there.copy_offs);
    std::copy_n(own.pulls, own.pull_offs[s.num_ranks], there.pulls);
    std::copy_n(own.copies, own.copy_offs[s.num_ranks], there.copies);
    std::copy_n(own.weights, own.copy_offs[s.num_ranks], there.weights);
  }
}

}  // namespace moe_rt
