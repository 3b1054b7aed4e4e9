// Last role of combine-type ops in two levels: add up this node's partials, then the sums of the nodes.
#pragma once

#include "forward.h"

namespace moe_rt {

// Rows that return for one token, from its entries of the send plan: the number of partials of its own node, and the
// rows to be added after that, in node order. Array indices are compile-time constants: a GPU would keep other arrays
// in memory.
template <class Dims>
struct Homecoming {
  int num_own = 0, num_rows = 0;
  int32_t rows[Dims::kTopkBound];  // twice the slot of another node's sum; own_row for this node's
  int32_t own_row;

  MOE_RT_FN Homecoming(const int32_t* sent, int num_topk, int num_node_slots, int own_node)
      : own_row(2 * (num_node_slots + own_node) - 1) {  // nodes with higher slots come after the own one
    for_topk<Dims>(num_topk, [&](int i) { rows[i] = kNone; });
    for_topk<Dims>(num_topk, [&](int k) {
      if (sent[k] == kNowhere) return;
      const int32_t slot = send_slot(sent[k]);
      const bool own = slot < num_node_slots;
      if (own && slot >= num_own) num_own = slot + 1;
      add(own ? own_row : 2 * slot, num_topk);
    });
  }

 private:
  static constexpr int32_t kNone = 0x7fffffff;
  // Inserts a row into the sorted list, unless it is there.
  MOE_RT_FN void add(const int32_t row, int num_topk) {
    int32_t next = row;
    bool is_new = true;
    for_topk<Dims>(num_topk, [&](int i) {
      const int32_t there = rows[i];
      is_new &= there != row;
      const bool before = is_new & (next < there);
      rows[i] = before ? next : there;
      next = before ? there : next;
    });
    num_rows += is_new;
  }
};

// out[t] = the sum over nodes, in node order, of each node's sum over its ranks, in rank order. The own node's sum is
// computed and rounded here as the others are at theirs, so that a result does not depend on the token's node.
// grad_topk_weights [T][K] is filled when not nullptr. `own` is as in flat/combine.h; `cached` are the same rows with
// stores that stay in the cache; `scratch` holds two of them, private to this lane.
template <class Coop, class Dims, class Weight, class Rows, class Own>
MOE_RT_FN void reduce_nodes(const Coop& coop, const Dims& dims, const World& w, int window, const int32_t* send_plan,
                            int64_t num_tokens, char* out, Weight* grad_topk_weights, const Rows& rows,
                            const Rows& cached, char* scratch, Own own) {
  const char* srcs[Dims::kTopkBound];
  const Range share = coop.share(num_tokens);
  if constexpr (!Own::kPushed) own.begin(share);
  for (int64_t t = share.begin; t < share.end; t += share.step) {
    const int32_t* sent = send_plan + t * dims.num_topk();
    const Homecoming<Dims> home(sent, dims.num_topk(), w.shape.num_node_slots(), w.nodes.own);
    const auto at = [&](int slot) { return w.at<char>(w.rank, w.partial_row(window, t, slot)); };
    for_topk<Dims>(home.num_own, [&](int slot) { srcs[slot] = at(slot); });
    if constexpr (!Own::kPushed) own.put_instead(t, srcs);
    rows.meet();  // lanes may still read the previous sum
    const char* const own_sum =
        home.num_own > 0 ? sum_node(srcs, home.num_own, cached, scratch, scratch + w.shape.row_bytes()) : nullptr;
    const int n = home.num_rows;
    for_topk<Dims>(n, [&](int i) { srcs[i] = home.rows[i] == home.own_row ? own_sum : at(home.rows[i] / 2); });
    rows.decode_sum(out + t * rows.tensor_row_bytes(), srcs, n);
    if (!grad_topk_weights || !coop.leader()) continue;
    for (int k = 0; k < dims.num_topk(); ++k) {
      const int64_t entry = t * dims.num_topk() + k;
      if (sent[k] == kNowhere) {
        grad_topk_weights[entry] = Weight(0);
        continue;
      }
      const int remote = send_slot(sent[k]) - w.shape.num_node_slots(), first_k = send_first_k(sent[k]);
      const int64_t offset = remote < 0 ? w.scalar(window, t, first_k) : w.remote_scalar(window, t, first_k, remote);
      grad_topk_weights[entry] = *w.at<Weight>(w.rank, offset);
    }
  }
}

}  // namespace moe_rt
