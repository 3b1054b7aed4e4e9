// Roles of a proxy: it acts on its node for its clients, ranks of other nodes, in either direction.
//
//   dispatch-type ops   mark_tokens: which tokens of a client this node needs, and for how many ranks
//                       for_wanted: iterates over these tokens, to stage each once for all ranks of the node
//   combine-type ops    send_sums: adds up what all ranks of this node have left for a token and sends one row
//                       send_entries: sends every row that they have left, if rows return by entry
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"
#include "../core/tuning.h"
#include "link.h"

namespace moe_rt {

// Counts one rank of this node that pulls a client's token. False if the entry is invalid: it must name a token, and
// the slots of a token's ranks must be in rank order, since send_sums reads that many slots from the first on.
MOE_RT_FN bool mark_token(const World& w, const Pull& pull, int32_t* forwards) {
  if (!below(pull.token, w.shape.num_max_tokens) || !below(pull.slot, w.shape.num_node_slots())) return false;
  int32_t& mark = forwards[pull.token];
  if (pull.slot != load_relaxed(mark)) return false;
  store_relaxed(mark, pull.slot + 1);  // stays within the slots, whatever another lane has marked meanwhile
  return true;
}

// Marks the entries of a client's token that visit one rank of this node. False if the pull or a copy is invalid, or
// names an entry that is marked.
template <class Lists>
MOE_RT_FN bool mark_entries(const World& w, const Pull& pull, const Lists& lists, int32_t* forwards) {
  const Shape& s = w.shape;
  const int64_t most = int64_t{s.num_max_tokens} * s.num_topk;
  if (!below(pull.token, s.num_max_tokens) || !below(int64_t{pull.copies} - 1, s.num_topk) ||
      !below(pull.first, most - pull.copies + 1))
    return false;
  int32_t* const set = forwards + int64_t{pull.token} * s.forward_ints();
  for (int32_t c = 0; c < pull.copies; ++c) {
    const int32_t k = lists.copies[pull.first + c].k;
    if (!below(k, s.num_topk)) return false;
    int32_t& word = set[k / 32];
    const int32_t bits = load_relaxed(word), bit = int32_t(1u << k % 32);
    if (bits & bit) return false;
    store_relaxed(word, bits | bit);
  }
  return true;
}

// Reads what a client (`source`) lists for each rank of this node, from its staged lists. forwards
// [T][Shape::forward_ints]: number of these ranks that each token visits, or set of its entries that visit them. False, on a lane that finds an error, if the lists are invalid. Only in invalid lists
// do two lanes have the same token of one rank, so their order does not matter.
template <class Weight, class Coop>
MOE_RT_FN bool mark_tokens(const Coop& coop, const World& w, int source, int window, int32_t* forwards) {
  const int64_t tokens = w.shape.num_max_tokens, most = tokens * w.shape.num_visits();
  const Range all = strided(coop, tokens);
  const int32_t ints = w.shape.forward_ints();
  for (int64_t t = all.begin; t < all.end; t += all.step) {
    for (int32_t i = 0; i < ints; ++i) forwards[t * ints + i] = 0;
  }
  const auto lists = RouteLists<Weight>::view(w, source, window);
  bool credible = true;
  for (int r = 0; r < w.shape.num_ranks; ++r) {
    if (w.nodes.node_of[r] != w.nodes.own) continue;
    coop.sync();  // after the marks of the previous rank
    const int64_t first = lists.pull_offs[r], end = lists.pull_offs[r + 1];
    // The loop must go on: another lane may have read an earlier value here, and waits for this lane.
    if (first < 0 || end > most) {
      credible = false;
      continue;
    }
    const Range pulls = strided(coop, end - first);
    for (int64_t i = pulls.begin; i < pulls.end; i += pulls.step) {
      const Pull pull = lists.pulls[first + i];
      credible &= w.shape.returns_entries() ? mark_entries(w, pull, lists, forwards) : mark_token(w, pull, forwards);
    }
  }
  return credible;
}

// True if all lists of a source are fetched in one round trip.
MOE_RT_FN bool lists_in_one_trip(const World& w) {
  const Layout::Window& o = w.layout.window[0];
  return o.tokens - o.counts <= tuning::kListsInOneTrip;
}

// True if a token is marked: `forward` is its part of forwards.
MOE_RT_FN bool is_marked(const World& w, const int32_t* forward) {
  if (!w.shape.returns_entries()) return *forward > 0;
  bool any = false;
  for (int32_t i = 0; i < w.shape.forward_ints(); ++i) any |= forward[i] != 0;
  return any;
}

// Calls fn(i, source, token) for each of the clients' tokens that this node needs, the i-th of all.
template <class Coop, class Fn>
MOE_RT_FN void for_wanted(const Coop& coop, const World& w, const int32_t* forwards, Fn&& fn) {
  const int32_t tokens = w.shape.num_max_tokens;
  const Range share = coop.share(int64_t{w.nodes.num_clients} * tokens);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    if (is_marked(w, forwards + i * w.shape.forward_ints()))
      fn(i, w.nodes.clients[int32_t(i) / tokens], int32_t(i) % tokens);
  }
}

// Returns the sum of `n` partials in the order of their slots, rounded to the dtype of rows and coded if rows are. A
// single partial is returned unchanged, so that nothing is rounded twice with one rank per node. `sum` and `coded` are
// scratch rows; `coded` may be the place where the sum is needed.
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

// Adds up this node's partials of the clients' tokens and sends the sums home by put(to, offset, row, bytes), with
// scalars if `scalars`. `sum` is a scratch row; coded(i) is one that stays valid as long as a put reads it.
template <class Dims, class Coop, class Rows, class Coded, class Put>
MOE_RT_FN void send_sums(const Coop& coop, const World& w, int window, const int32_t* forwards, const Rows& rows,
                         bool scalars, char* sum, Coded&& coded, Put&& put) {
  const Shape& s = w.shape;
  const NodeLink link{window};
  for_wanted(coop, w, forwards, [&](int64_t i, int to, int32_t token) {
    const char* partials[Dims::kTopkBound];
    for_topk<Dims>(forwards[i],
                   [&](int slot) { partials[slot] = link.target_row(w, to, w.partial_row(window, token, slot)); });
    const int64_t remote = Nodes::remote_index(w.nodes.own, w.nodes.node_of[to]);
    const char* const row = sum_node(partials, forwards[i], rows, sum, coded(i));
    put(to, w.partial_row(window, token, s.num_node_slots() + remote), row, rows.encoded_row_bytes());
    if (!scalars) return;
    const int64_t bytes = int64_t{s.num_topk} * s.acc_bytes;
    put(to, w.remote_scalar(window, token, 0, remote),
        w.at<const char>(w.rank, w.layout.window[window].forwarded_scalars + i * bytes), bytes);
  });
}

// Sends home, unchanged, the rows that this node's ranks have left for the clients' tokens, each with its scalar, of
// `bytes` bytes in all.
template <class Coop, class Put>
MOE_RT_FN void send_entries(const Coop& coop, const World& w, int window, const int32_t* forwards, int64_t bytes,
                            Put&& put) {
  const NodeLink link{window};
  const int32_t ints = w.shape.forward_ints();
  for_wanted(coop, w, forwards, [&](int64_t i, int to, int32_t token) {
    for (int32_t k = 0; k < w.shape.num_topk; ++k) {
      if ((uint32_t(forwards[i * ints + k / 32]) >> k % 32 & 1) == 0) continue;
      const int64_t home = w.entry_row(window, token, k);
      put(to, home, link.target_row(w, to, home), bytes);
    }
  });
}

}  // namespace moe_rt
