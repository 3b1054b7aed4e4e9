// The roles of dispatch-type ops: publish rows into the own window, then pull what the experts here need from every
// peer.
//
//   dispatch           publish_rows + routing.h | wait | index_blocks, gather
//   combine backward   publish_rows             | wait | gather_grad        (reuses the handle's plan: no routing)
// `Rows` is the row primitive of the machine: copy(dst, src) and scale_dot(dst, w, g, y), each over `hidden` elements.
#pragma once

#include "routing.h"

namespace moe_rt {

template <class Coop, class Rows>
MOE_RT_FN void publish_rows(const Coop& coop, const World& w, uint64_t seq, const char* x, int64_t num_tokens,
                            const Rows& rows) {
  const Range tokens = coop.share(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t += tokens.step) {
    rows.copy(w.token_row(w.rank, seq, t), x + t * rows.tensor_row_bytes());
  }
}

// Where each (local expert, source) block of rows starts in recv_x, and what each source sends here.
struct Blocks {
  int32_t* start;       // [L][R]
  int32_t* pull_start;  // [R + 1] of the plan's pulled list
  int32_t* copy_start;  // [R + 1] of its row list
};

// True when a peer's lists cannot lead us out of bounds: a crashed or corrupted peer must not corrupt us.
template <class Weight>
MOE_RT_FN bool plausible(const World& w, const RouteLists<Weight>& lists) {
  const int me = w.rank;
  const int64_t tokens = w.shape.num_max_tokens;
  const int64_t most = tokens * smaller(w.shape.num_topk, w.num_local_experts());
  const int64_t pulls = int64_t{lists.pull_offs[me + 1]} - lists.pull_offs[me];
  const int64_t copies = int64_t{lists.copy_offs[me + 1]} - lists.copy_offs[me];
  if (lists.pull_offs[me] < 0 || lists.pull_offs[me + 1] > tokens * w.shape.num_slots()) return false;
  if (lists.copy_offs[me] < 0 || lists.copy_offs[me + 1] > tokens * w.shape.num_topk) return false;
  if (pulls < 0 || pulls > tokens || copies < pulls || copies > most) return false;
  int64_t sum = 0;
  for (int i = w.placement.rank_first[me]; i < w.placement.rank_first[me + 1]; ++i) {
    if (lists.counts[i] < 0 || lists.counts[i] > tokens) return false;
    sum += lists.counts[i];
  }
  return sum == copies;
}

// Fills blocks and offs from the counts of all sources. One lane's work. `offs` is clipped to capacity; rows beyond it
// are dropped in row order. Returns the first source whose lists are not plausible, or -1.
template <class Weight>
MOE_RT_FN int index_blocks(const World& w, uint64_t seq, const Blocks& blocks, int32_t* offs, RecvPlan::Head* head) {
  const int num_ranks = w.shape.num_ranks, first = w.placement.rank_first[w.rank];
  blocks.pull_start[0] = blocks.copy_start[0] = 0;
  for (int s = 0; s < num_ranks; ++s) {
    const auto lists = RouteLists<Weight>::view(w, s, seq);
    if (!plausible(w, lists)) return s;
    blocks.pull_start[s + 1] = blocks.pull_start[s] + lists.pull_offs[w.rank + 1] - lists.pull_offs[w.rank];
    blocks.copy_start[s + 1] = blocks.copy_start[s] + lists.copy_offs[w.rank + 1] - lists.copy_offs[w.rank];
  }
  int64_t row = 0;
  const int64_t capacity = w.capacity[w.rank];
  for (int e = 0; e < w.num_local_experts(); ++e) {
    for (int s = 0; s < num_ranks; ++s) {
      blocks.start[e * num_ranks + s] = int32_t(row);
      row += RouteLists<Weight>::view(w, s, seq).counts[first + e];
    }
    offs[e] = int32_t(smaller(row, capacity));
  }
  *head = {seq, blocks.pull_start[num_ranks], blocks.copy_start[num_ranks], int32_t(row - smaller(row, capacity)), {}};
  return -1;
}

// The rank whose recv_x would overflow, or -1; every rank computes the same answer from what all sources published.
template <class Weight>
MOE_RT_FN int overflowing_rank(const World& w, uint64_t seq, int64_t* needed) {
  for (int r = 0; r < w.shape.num_ranks; ++r) {
    int64_t rows = 0;
    for (int s = 0; s < w.shape.num_ranks; ++s) {
      const auto lists = RouteLists<Weight>::view(w, s, seq);
      rows += int64_t{lists.copy_offs[r + 1]} - lists.copy_offs[r];
    }
    *needed = rows;
    if (rows > w.capacity[r]) return r;
  }
  return -1;
}

// Pulls one token: its row once from the source's window, written to each of its copies' rows. False if it points
// astray.
template <class Weight, class Rows>
MOE_RT_FN bool gather_token(const World& w, uint64_t seq, int source, const RouteLists<Weight>& lists, const Pull& pull,
                            const Blocks& blocks, char* recv_x, Weight* recv_weights, const RecvPlan& plan,
                            Pulled* pulled, const Rows& rows) {
  const int32_t copies_end = lists.copy_offs[w.rank + 1], shift = blocks.copy_start[source] - lists.copy_offs[w.rank];
  if (pull.token < 0 || pull.token >= w.shape.num_max_tokens || pull.slot < 0 || pull.slot >= w.shape.num_slots() ||
      pull.first < lists.copy_offs[w.rank] || pull.copies < 1 || pull.copies > copies_end - pull.first) {
    return false;
  }
  *pulled = {pull.token, int16_t(source), int16_t(pull.slot), pull.first + shift, pull.copies};
  const char* src = w.token_row(source, seq, pull.token);
  const int32_t* counts = lists.counts + w.placement.rank_first[w.rank];
  for (int c = pull.first; c < pull.first + pull.copies; ++c) {
    const Copy copy = lists.copies[c];
    if (copy.expert < 0 || copy.expert >= w.num_local_experts() || copy.index < 0 ||
        copy.index >= counts[copy.expert] || copy.k < 0 || copy.k >= w.shape.num_topk) {
      return false;
    }
    const int64_t row = int64_t{blocks.start[copy.expert * w.shape.num_ranks + source]} + copy.index;
    const bool kept = row < w.capacity[w.rank];
    plan.rows[c + shift] = kept ? int32_t(row) : kDropped;
    plan.ks[c + shift] = copy.k;
    if (!kept) continue;
    rows.copy(recv_x + row * rows.tensor_row_bytes(), src);
    recv_weights[row] = lists.weights[c];
  }
  return true;
}

// Returns a source with entries that point astray, or -1.
template <class Coop, class Weight, class Rows>
MOE_RT_FN int gather(const Coop& coop, const World& w, uint64_t seq, const Blocks& blocks, char* recv_x,
                     Weight* recv_weights, const RecvPlan& plan, const Rows& rows) {
  for (int i = 0; i < w.shape.num_ranks; ++i) {
    const int source = (w.rank + i) % w.shape.num_ranks;  // start at home: peers do not all read the same rank first
    const auto lists = RouteLists<Weight>::view(w, source, seq);
    const Pull* pulls = lists.pulls + lists.pull_offs[w.rank];
    const Range share = coop.share(lists.pull_offs[w.rank + 1] - lists.pull_offs[w.rank]);
    for (int64_t p = share.begin; p < share.end; p += share.step) {
      if (!gather_token(w, seq, source, lists, pulls[p], blocks, recv_x, recv_weights, plan,
                        plan.pulled + blocks.pull_start[source] + p, rows)) {
        return source;
      }
    }
  }
  return -1;
}

// grad_y[row] = weight[row] * g[token] and grad_recv_weights[row] = <g[token], y[row]>, from the windows' grad_out
// rows.
template <class Coop, class Weight, class Rows>
MOE_RT_FN void gather_grad(const Coop& coop, const World& w, uint64_t seq, const RecvPlan& plan, const char* y,
                           const Weight* recv_weights, char* grad_y, Weight* grad_recv_weights, const Rows& rows) {
  const Range share = coop.share(plan.head->num_pulled);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    const Pulled p = plan.pulled[i];
    const char* g = w.token_row(p.source, seq, p.token);
    for (int c = p.first; c < p.first + p.copies; ++c) {
      const int64_t row = plan.rows[c];
      if (row == kDropped) continue;
      const int64_t at = row * rows.tensor_row_bytes();
      grad_recv_weights[row] = rows.scale_dot(grad_y + at, recv_weights[row], g, y + at);
    }
  }
}

}  // namespace moe_rt
