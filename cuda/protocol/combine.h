// The roles of combine-type ops: sum a token's rows here, push the partial to its source, then add up what came home.
//
//   combine             push (weights)        | wait | reduce
//   dispatch backward   push (unit weights)   | wait | reduce   and one scalar per (token, k): the routing-weight
//   gradient
// `Rows` is the row primitive: weighted_sum(dst, srcs, weights, n), summed in the order given, in the accumulator type.
#pragma once

#include "coop.h"
#include "dims.h"
#include "plan.h"

namespace moe_rt {

// weights == nullptr means one; scalars (one per row) are sent home when not nullptr. Dropped rows add nothing.
template <class Coop, class Dims, class Weight, class Rows>
MOE_RT_FN void push(const Coop& coop, const Dims& dims, const World& w, uint64_t seq, const RecvPlan& plan,
                    const char* y, const Weight* weights, const Weight* scalars, const Rows& rows) {
  const char* srcs[Dims::kTopkBound];
  Weight factors[Dims::kTopkBound];
  const Range share = coop.share(plan.head->num_pulled);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    const Pulled p = plan.pulled[i];
    Weight* home = w.at<Weight>(p.source, w.window(seq).scalars) + int64_t{p.token} * dims.num_topk();
    int n = 0;
    for (int c = p.first; c < p.first + p.copies; ++c) {
      const int64_t row = plan.rows[c];
      if (scalars) home[plan.ks[c]] = row == kDropped ? Weight(0) : scalars[row];
      if (row == kDropped) continue;
      srcs[n] = y + row * rows.tensor_row_bytes();
      factors[n++] = weights ? weights[row] : Weight(1);
    }
    rows.weighted_sum(w.partial_row(p.source, seq, p.token, p.slot), srcs, factors, n);
  }
}

// out[t] = sum of the token's partials in rank order; grad_topk_weights [T][K] is filled when not nullptr.
template <class Coop, class Dims, class Weight, class Rows>
MOE_RT_FN void reduce(const Coop& coop, const Dims& dims, const World& w, uint64_t seq, const int32_t* send_plan,
                      int64_t num_tokens, char* out, Weight* grad_topk_weights, const Rows& rows) {
  const char* srcs[Dims::kTopkBound];
  Weight ones[Dims::kTopkBound];
  for (int i = 0; i < dims.num_topk(); ++i) ones[i] = Weight(1);
  const Range share = coop.share(num_tokens);
  for (int64_t t = share.begin; t < share.end; t += share.step) {
    const int32_t* sent = send_plan + t * dims.num_topk();
    const int n = num_partials(sent, dims.num_topk());
    for (int slot = 0; slot < n; ++slot) srcs[slot] = w.partial_row(w.rank, seq, t, slot);
    rows.weighted_sum(out + t * rows.tensor_row_bytes(), srcs, ones, n);
    if (!grad_topk_weights) continue;
    const Weight* scalars = w.at<Weight>(w.rank, w.window(seq).scalars) + t * dims.num_topk();
    for (int k = 0; k < dims.num_topk(); ++k) {
      grad_topk_weights[t * dims.num_topk() + k] = sent[k] == kNowhere ? Weight(0) : scalars[send_first_k(sent[k])];
    }
  }
}

}  // namespace moe_rt
