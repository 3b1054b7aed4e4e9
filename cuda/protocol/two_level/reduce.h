// The last role of combine-type ops where sums of other nodes come home: add up this node's partials, then the nodes.
#pragma once

#include "forward.h"

namespace moe_rt {

// What comes home for one token, by its entries of the send plan: how many partials of its own node, and which other
// nodes' sums, as slots in the order of nodes.
template <class Dims>
struct Homecoming {
  int num_own = 0, num_far = 0;
  int32_t far[Dims::kTopkBound];

  MOE_RT_FN Homecoming(const int32_t* sent, int num_topk, int num_node_slots) {
    for (int k = 0; k < num_topk; ++k) {
      if (sent[k] == kNowhere) continue;
      const int32_t slot = send_slot(sent[k]);
      if (slot < num_node_slots) {
        if (slot >= num_own) num_own = slot + 1;
        continue;
      }
      int at = num_far;
      while (at > 0 && far[at - 1] >= slot) --at;
      if (at < num_far && far[at] == slot) continue;
      for (int i = num_far++; i > at; --i) far[i] = far[i - 1];
      far[at] = slot;
    }
  }
};

// out[t] = the sum over nodes, in their order, of each node's sum over its ranks, in rank order. The own node's is made
// and rounded here as the others' where they are, so that a result does not depend on which node a token lives on.
// grad_topk_weights [T][K] is filled when not nullptr. `own` as in flat/combine.h; `cached` are the same rows with stores
// that stay in the cache; `scratch` has room for two of them, for this lane alone.
template <class Coop, class Dims, class Weight, class Rows, class Own>
MOE_RT_FN void reduce_nodes(const Coop& coop, const Dims& dims, const World& w, int window, const int32_t* send_plan,
                            int64_t num_tokens, char* out, Weight* grad_topk_weights, const Rows& rows,
                            const Rows& cached, char* scratch, Own own) {
  const char* srcs[Dims::kTopkBound];
  const char* own_srcs[Dims::kTopkBound];
  const int own_at = w.shape.num_node_slots() + w.nodes.own;  // nodes with slots from here on come after the own one
  const Range share = coop.share(num_tokens);
  if constexpr (!Own::kPushed) own.begin(share);
  for (int64_t t = share.begin; t < share.end; t += share.step) {
    const int32_t* sent = send_plan + t * dims.num_topk();
    const Homecoming<Dims> home(sent, dims.num_topk(), w.shape.num_node_slots());
    const auto at = [&](int slot) { return w.at<char>(w.rank, w.partial_row(window, t, slot)); };
    for (int slot = 0; slot < home.num_own; ++slot) own_srcs[slot] = at(slot);
    if constexpr (!Own::kPushed) own.put_instead(t, own_srcs);
    int n = 0;
    const auto add_own = [&] {
      srcs[n++] = sum_node(own_srcs, home.num_own, cached, scratch, scratch + w.shape.row_bytes());
    };
    bool added = home.num_own == 0;
    for (int i = 0; i < home.num_far; ++i) {
      if (!added && home.far[i] >= own_at) add_own(), added = true;
      srcs[n++] = at(home.far[i]);
    }
    if (!added) add_own();
    rows.decode_sum(out + t * rows.tensor_row_bytes(), srcs, n);
    if (!grad_topk_weights || !coop.leader()) continue;
    for (int k = 0; k < dims.num_topk(); ++k) {
      const int64_t entry = t * dims.num_topk() + k;
      if (sent[k] == kNowhere) {
        grad_topk_weights[entry] = Weight(0);
        continue;
      }
      const int far = send_slot(sent[k]) - w.shape.num_node_slots(), first_k = send_first_k(sent[k]);
      const int64_t offset = far < 0 ? w.scalar(window, t, first_k) : w.far_scalar(window, t, first_k, far);
      grad_topk_weights[entry] = *w.at<Weight>(w.rank, offset);
    }
  }
}

}  // namespace moe_rt
