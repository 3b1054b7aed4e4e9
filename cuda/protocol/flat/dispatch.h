// Roles of dispatch-type ops: publish rows into the own window, then pull the rows that the experts here need from
// peers.
//
//   dispatch           publish_rows + routing.h | wait | index.h, gather
//   combine backward   publish_rows             | wait | gather_grad        (reuses the handle's plan: no routing)
// `Rows` is the machine's row primitive, over the `hidden` elements of each row, or over its codes and its scales,
// which are in a second tensor: publish(dst, x, row), spread(to, rows, n, src), clear(to, row), and scale_dots(dst, y,
// rows, weights, g, dots, n). `Link` reaches a peer's segment (link.h).
#pragma once

#include "../core/dims.h"
#include "../core/link.h"
#include "../core/plan.h"
#include "index.h"

namespace moe_rt {

// Copies each token's row into the window once, unless its producer wrote it there. rows.publish encodes rows that
// travel coded.
template <class Coop, class Rows>
MOE_RT_FN void publish_rows(const Coop& coop, const World& w, int window, const char* x, int64_t num_tokens,
                            const Rows& rows) {
  if (x == w.at<const char>(w.rank, w.token_row(window, 0))) return;
  const Range tokens = coop.share(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t += tokens.step) {
    rows.publish(w.at<char>(w.rank, w.token_row(window, t)), x, t);
  }
}

// Outputs of dispatch.
template <class Weight>
struct Received {
  char* recv_x;
  Weight* recv_weights;  // [capacity], or [capacity][K] with RecvLayout::kTokens
  int64_t capacity;      // rows of recv_x and recv_weights
  RecvPlan plan;
};

inline constexpr int32_t kOutOfRange = kDropped - 1;  // in place of a row: the source's entry is wrong

// Returns one lane's pull to all lanes of a warp, which must take the same branches: a peer could change the entry
// between two of their loads.
template <class Coop>
MOE_RT_FN Pull agreed(const Coop& coop, const Pull& pull) {
  if constexpr (requires { coop.same(pull.token); }) {
    return {coop.same(pull.token), coop.same(pull.slot), coop.same(pull.first), coop.same(pull.copies)};
  } else {
    return pull;
  }
}

// Pulls the i-th token of all: reads its row once from the source's window and writes it to each of its copies' rows,
// or with RecvLayout::kTokens to row i. False if the source's entry is out of range.
template <class Coop, class Dims, class Weight, class Rows, class Link>
MOE_RT_FN bool gather_token(const Coop& coop, const Dims& dims, const World& w, int window, int source, int64_t i,
                            const Blocks& b, const Received<Weight>& out, const Rows& rows, const Link& link) {
  const bool by_token = w.shape.by_token();
  if (by_token && coop.leader() && i < out.capacity) {  // also if the entry turns out to be wrong
    for (int k = 0; k < dims.num_topk(); ++k) {
      out.plan.ids[i * dims.num_topk() + k] = kNoExpert;
      out.recv_weights[i * dims.num_topk() + k] = 0;
    }
  }
  if constexpr (requires { coop.meet_warp(); }) {
    if (by_token) coop.meet_warp();  // other lanes overwrite some of these below
  }
  const auto lists = RouteLists<Weight>::received(w, source, window, b.pushed);
  const Pull pull = agreed(coop, lists.pulls[b.first_pull[source] + (i - b.pull_start[source])]);
  const int32_t first_copy = b.first_copy[source], num_copies = b.copy_start[source + 1] - b.copy_start[source];
  const int32_t tokens = b.pushed_rows ? w.shape.num_pushed_rows : w.shape.num_max_tokens;
  if (pull.token < 0 || pull.token >= tokens || pull.slot < 0 || pull.slot >= w.shape.num_node_slots() ||
      pull.copies < 1 || pull.copies > dims.num_topk() || pull.first < first_copy ||
      pull.copies > num_copies - (pull.first - first_copy)) {
    return false;
  }
  const int32_t at = b.copy_start[source] + pull.first - first_copy;
  if (coop.leader()) out.plan.pulled[i] = {pull.token, int16_t(source), int16_t(pull.slot), at, pull.copies};
  const int64_t num_ranks = w.shape.num_ranks, num_local = w.num_local_experts();
  int32_t to[Dims::kTopkBound];
  collect<Dims::kTopkBound>(coop, pull.copies, to, [&](int c, bool writes) -> int32_t {
    const Copy copy = lists.copies[pull.first + c];
    const Weight weight = writes ? lists.weights[pull.first + c] : Weight(0);
    const int64_t block = copy.expert * num_ranks + source;
    if (copy.expert < 0 || copy.expert >= num_local || copy.k < 0 || copy.k >= dims.num_topk() || copy.index < 0 ||
        copy.index >= b.end(copy.expert, source, int32_t(num_ranks)) - b.start[block]) {
      return kOutOfRange;
    }
    const int64_t row = by_token ? i : int64_t{b.start[block]} + copy.index;
    const bool fits = row < out.capacity, kept = fits && (c == 0 || !by_token);
    const int32_t kept_row = kept ? int32_t(row) : kDropped;
    if (!writes) return kept_row;
    out.plan.rows[at + c] = kept_row;
    out.plan.ks[at + c] = copy.k;
    const int64_t entry = by_token ? row * dims.num_topk() + copy.k : row;
    if (fits) out.recv_weights[entry] = weight;
    if (fits && by_token) out.plan.ids[entry] = copy.expert;
    return kept_row;
  });
  bool out_of_range = false;
  for_topk<Dims>(pull.copies, [&](int c) { out_of_range |= to[c] == kOutOfRange; });
  if (out_of_range) return false;
  const char* const row = b.pushed_rows
                              ? w.at<const char>(w.rank, w.pushed_row(window, source, pull.token))
                              : link.source_row(w, source, w.token_row(window, pull.token), rows.encoded_row_bytes());
  rows.spread(out.recv_x, to, pull.copies, row);
  return true;
}

// Returns a source whose pull entries do not cover all its copies exactly once and in order, or -1. Otherwise some plan
// entry would belong to no token or to two, and a later op that follows the plan would blame this rank. Called after
// gather; reads private memory only.
MOE_RT_FN int unshared_copies(const World& w, const Blocks& b, const RecvPlan& plan) {
  for (int source = 0; source < w.shape.num_ranks; ++source) {
    int64_t next = b.copy_start[source];
    for (int32_t i = b.pull_start[source]; i < b.pull_start[source + 1]; ++i) {
      if (plan.pulled[i].first != next) return source;
      next += plan.pulled[i].copies;
    }
    if (next != b.copy_start[source + 1]) return source;
  }
  return -1;
}

// Zeroes the padding rows between an expert's last row, given by `ends`, and the next expert's first row, and their
// weights. Writes no row from num_rows on.
template <class Coop, class Weight, class Rows>
MOE_RT_FN void clear_padding(const Coop& coop, const World& w, const int32_t* ends, int64_t num_rows, char* to,
                             Weight* weights, const Rows& rows) {
  for (int32_t e = 0; w.shape.alignment > 1 && e < w.num_local_experts(); ++e) {
    const int64_t first = min_of<int64_t>(ends[e], num_rows);
    const int64_t end = min_of(w.shape.aligned(first), num_rows);
    const Range share = coop.share(end - first);
    for (int64_t i = share.begin; i < share.end; i += share.step) {
      rows.clear(to, first + i);
      if (coop.leader()) weights[first + i] = 0;
    }
  }
}

// Gathers all tokens. Returns a source with entries out of range, or -1; all other tokens are gathered, since a GPU
// returns its outputs in any case. Ranks start at their own rows, so that peers do not all read the same rank first.
template <class Coop, class Dims, class Weight, class Rows, class Link>
MOE_RT_FN int gather(const Coop& coop, const Dims& dims, const World& w, int window, const Blocks& b,
                     const Received<Weight>& out, const Rows& rows, const Link& link) {
  const uint32_t total = b.pull_start[w.shape.num_ranks];
  const Range share = coop.share(total);
  const uint32_t end = share.end, step = share.step;  // below 2^31: fit one register of a GPU
  int source = 0, corrupt = -1;
  for (uint32_t q = share.begin; q < end; q += step) {
    const uint32_t ahead = q + b.pull_start[w.rank];
    const int32_t i = ahead < total ? ahead : ahead - total;
    if (i < b.pull_start[source]) source = 0;
    while (i >= b.pull_start[source + 1]) ++source;
    if (!gather_token(coop, dims, w, window, source, i, b, out, rows, link)) corrupt = source;
  }
  return corrupt;
}

// grad_y[row] = weight[row] * g[token] and grad_recv_weights[row] = <g[token], y[row]>, from the grad_out rows in the
// windows. Each of them is read once for all rows that copy it. Without weights, only grad_y[row] = g[token].
template <class Dims, class Coop, class Weight, class Rows, class Link>
MOE_RT_FN void gather_grad(const Coop& coop, const World& w, int window, const RecvPlan& plan, const char* y,
                           const Weight* recv_weights, char* grad_y, Weight* grad_recv_weights, const Rows& rows,
                           const Link& link) {
  const Range share = coop.share(plan.head->num_pulled);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    const Pulled p = plan.pulled[i];
    if (!plan.can_follow(w, p)) continue;
    const char* g = link.source_row(w, p.source, w.token_row(window, p.token), rows.encoded_row_bytes());
    int32_t at[Dims::kTopkBound];
    if (!recv_weights) {
      at[0] = plan.row(p.first);
      rows.spread(grad_y, at, 1, g);
      continue;
    }
    Weight weights[Dims::kTopkBound], dots[Dims::kTopkBound];
    for_topk<Dims>(p.copies, [&](int c) {
      at[c] = plan.row(p.first + c);
      weights[c] = at[c] == kDropped ? Weight(0) : recv_weights[at[c]];
    });
    rows.scale_dots(grad_y, y, at, weights, g, dots, p.copies);
    if (!coop.leader()) continue;
    for_topk<Dims>(p.copies, [&](int c) {
      if (at[c] != kDropped) grad_recv_weights[at[c]] = dots[c];
    });
  }
}

}  // namespace moe_rt
