// The roles of a forwarder, the rank that stands on its node for ranks of other nodes, in either direction.
//
//   dispatch-type ops   mark_tokens: which tokens of a far source this node wants, and how often; once for all its ranks
//                       for_wanted: each of them, to be staged
//   combine-type ops    send_sums: what all ranks of this node have left for those tokens, as one row each
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"
#include "link.h"

namespace moe_rt {

// Counts what a far source lists for a rank of this node. False where that cannot be true: it must be a token, and the
// slots of a token's ranks must be in rank order, since send_sums takes so many from the first on.
MOE_RT_FN bool mark_token(const World& w, const Pull& pull, int32_t* forwards) {
  if (!below(pull.token, w.shape.num_max_tokens) || !below(pull.slot, w.shape.num_node_slots())) return false;
  int32_t& mark = forwards[pull.token];
  if (pull.slot != load_relaxed(mark)) return false;
  store_relaxed(mark, pull.slot + 1);  // no more than there are slots, whatever another lane has marked meanwhile
  return true;
}

// Reads what the far source that is `served` here lists for each rank of this node, from the lists as they were staged.
// forwards [T]: of how many of them each token is. False, on a lane that finds it, where the lists cannot be true. Two
// lanes have the same token of one rank in such lists alone; which of them is first then does not matter.
template <class Weight, class Coop>
MOE_RT_FN bool mark_tokens(const Coop& coop, const World& w, int source, int window, int32_t* forwards) {
  const int64_t tokens = w.shape.num_max_tokens, most = tokens * w.shape.num_visits();
  const Range all = strided(coop, tokens);
  for (int64_t t = all.begin; t < all.end; t += all.step) forwards[t] = 0;
  const auto lists = RouteLists<Weight>::view(w, source, window);
  bool credible = true;
  for (int r = 0; r < w.shape.num_ranks; ++r) {
    if (w.nodes.node_of[r] != w.nodes.own) continue;
    coop.sync();  // after the marks of the rank before
    const int64_t first = lists.pull_offs[r], end = lists.pull_offs[r + 1];
    // Not the end of the loop: another lane may have read what was there before, and waits for this one.
    if (first < 0 || end > most) {
      credible = false;
      continue;
    }
    const Range pulls = strided(coop, end - first);
    for (int64_t i = pulls.begin; i < pulls.end; i += pulls.step) {
      credible &= mark_token(w, lists.pulls[first + i], forwards);
    }
  }
  return credible;
}

// Whether all lists of a source come in one trip: so few bytes take less than a second one.
MOE_RT_FN bool lists_in_one_trip(const World& w) {
  const Layout::Window& o = w.layout.window[0];
  return o.tokens - o.counts <= 16 << 10;
}

// fn(i, source, token) for each token of the served sources that this node wants: its mark is forwards[i].
template <class Coop, class Fn>
MOE_RT_FN void for_wanted(const Coop& coop, const World& w, const int32_t* forwards, Fn&& fn) {
  const int32_t tokens = w.shape.num_max_tokens;
  const Range share = coop.share(int64_t{w.nodes.num_served} * tokens);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    if (forwards[i] > 0) fn(i, w.nodes.served[int32_t(i) / tokens], int32_t(i) % tokens);
  }
}

// The sum of `n` partials in the order of their slots, rounded to the dtype of rows and coded as they are; a single
// partial is its node's sum as it is, so that with one rank on each node nothing is rounded twice. `sum` and `coded` are
// rows of scratch; `coded` may be where the sum is wanted. Returns where it is, for rows to read.
template <class Rows>
MOE_RT_FN const char* sum_node(const char* const* partials, int n, const Rows& rows, char* sum, char* coded) {
  if (n == 1) return partials[0];
  if (!rows.coded()) {
    rows.decode_sum(coded, partials, n);
  } else {
    rows.decode_sum(sum, partials, n);
    rows.meet();
    rows.encode(coded, sum);
  }
  rows.meet();
  return coded;
}

// Adds up this node's partials of served ranks' tokens and sends the sums home by put(to, offset, row, bytes), with
// scalars where there are any. `sum` is a row of scratch, and coded(i) one that stays as long as a put reads it.
template <class Dims, class Coop, class Rows, class Coded, class Put>
MOE_RT_FN void send_sums(const Coop& coop, const World& w, int window, const int32_t* forwards, const Rows& rows,
                         bool scalars, char* sum, Coded&& coded, Put&& put) {
  const Shape& s = w.shape;
  const NodeLink link{window};
  for_wanted(coop, w, forwards, [&](int64_t i, int to, int32_t token) {
    const char* partials[Dims::kTopkBound];
    for_topk<Dims>(forwards[i],
                   [&](int slot) { partials[slot] = link.target_row(w, to, w.partial_row(window, token, slot)); });
    const int64_t far = Nodes::far_index(w.nodes.own, w.nodes.node_of[to]);
    const char* const row = sum_node(partials, forwards[i], rows, sum, coded(i));
    put(to, w.partial_row(window, token, s.num_node_slots() + far), row, rows.encoded_row_bytes());
    if (!scalars) return;
    const int64_t bytes = int64_t{s.num_topk} * s.acc_bytes;
    put(to, w.far_scalar(window, token, 0, far),
        w.at<const char>(w.rank, w.layout.window[window].forwarded_scalars + i * bytes), bytes);
  });
}

}  // namespace moe_rt
