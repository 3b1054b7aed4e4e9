// The roles of a forwarder, the rank that stands on its node for ranks of other nodes, in either direction.
//
//   dispatch-type ops   mark_tokens: which tokens of a far source this node wants, and how often; once for all its ranks
//   combine-type ops    sum_node: what all ranks of this node have left for the source's tokens, as one row each
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"

namespace moe_rt {

// Reads what the far source that is `served` here lists for each rank of this node, from the lists as they were staged.
// forwards [T]: of how many of them each token is. False where the lists cannot be true: what they lead to must be a
// token, and the slots of its ranks must be in rank order, since sum_node takes so many from the first on.
template <class Weight>
MOE_RT_FN bool mark_tokens(const World& w, int source, int window, int32_t* forwards) {
  const int64_t tokens = w.shape.num_max_tokens, most = tokens * w.shape.num_visits();
  for (int64_t t = 0; t < tokens; ++t) forwards[t] = 0;
  const auto lists = RouteLists<Weight>::view(w, source, window);
  for (int r = 0; r < w.shape.num_ranks; ++r) {
    if (w.nodes.node_of[r] != w.nodes.own) continue;
    const int32_t first = lists.pull_offs[r], end = lists.pull_offs[r + 1];
    if (first < 0 || end > most) return false;
    for (int32_t i = first; i < end; ++i) {
      const Pull pull = lists.pulls[i];
      if (!below(pull.token, tokens) || !below(pull.slot, w.shape.num_node_slots())) return false;
      if (pull.slot != forwards[pull.token]) return false;
      ++forwards[pull.token];
    }
  }
  return true;
}

// The sum of `n` partials in the order of their slots, rounded to the dtype of rows and coded as they are; a single
// partial is its node's sum as it is, so that with one rank on each node nothing is rounded twice. `sum` and `coded` are
// rows of scratch; `coded` may be where the sum is wanted. Returns where it is.
template <class Rows>
MOE_RT_FN const char* sum_node(const char* const* partials, int n, const Rows& rows, char* sum, char* coded) {
  if (n == 1) return partials[0];
  if (!rows.coded()) {
    rows.decode_sum(coded, partials, n);
    return coded;
  }
  rows.decode_sum(sum, partials, n);
  rows.encode(coded, sum);
  return coded;
}

}  // namespace moe_rt
