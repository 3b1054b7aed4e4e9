// The roles of combine-type ops: sum a token's rows here, push the partial to its source, then add up what came home.
//
//   combine             push (weights)        | wait | reduce
//   dispatch backward   push (unit weights)   | wait | reduce   and one scalar per (token, k): the routing-weight
//   gradient
// `Rows` is the row primitive: sum_to_wire(dst, srcs, weights, n) without the sources that are nullptr, and
// sum_from_wire(dst, srcs, n), in the order given, in the accumulator type. `Link` is how a peer's segment is reached
// (link.h).
#pragma once

#include "coop.h"
#include "dims.h"
#include "link.h"
#include "plan.h"

namespace moe_rt {

// weights == nullptr means one; scalars (one per row) are sent home when not nullptr. Dropped rows add nothing.
template <class Coop, class Dims, class Weight, class Rows, class Link>
MOE_RT_FN void push(const Coop& coop, const Dims&, const World& w, uint64_t seq, const RecvPlan& plan, const char* y,
                    const Weight* weights, const Weight* scalars, const Rows& rows, const Link& link) {
  const char* srcs[Dims::kTopkBound];
  Weight factors[Dims::kTopkBound];
  const Range share = coop.share(plan.head->num_pulled);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    const Pulled p = plan.pulled[i];
    for_topk<Dims>(p.copies, [&](int c) {
      const int64_t row = plan.rows[p.first + c];
      const bool kept = row != kDropped;
      if (scalars && coop.leader()) {
        link.put(w, p.source, w.scalar(seq, p.token, plan.ks[p.first + c]), kept ? scalars[row] : Weight(0));
      }
      srcs[c] = kept ? y + row * rows.tensor_row_bytes() : nullptr;
      factors[c] = kept && weights ? weights[row] : Weight(1);
    });
    const int64_t home = w.partial_row(seq, p.token, p.slot);
    rows.sum_to_wire(link.target_row(w, p.source, home), srcs, factors, p.copies);
    link.deliver(w, p.source, home, rows.wire_bytes());
  }
}

// out[t] = sum of the token's partials in rank order; grad_topk_weights [T][K] is filled when not nullptr.
template <class Coop, class Dims, class Weight, class Rows>
MOE_RT_FN void reduce(const Coop& coop, const Dims& dims, const World& w, uint64_t seq, const int32_t* send_plan,
                      int64_t num_tokens, char* out, Weight* grad_topk_weights, const Rows& rows) {
  const char* srcs[Dims::kTopkBound];
  const Range share = coop.share(num_tokens);
  for (int64_t t = share.begin; t < share.end; t += share.step) {
    const int32_t* sent = send_plan + t * dims.num_topk();
    const int n = num_partials(sent, dims.num_topk());
    for_topk<Dims>(n, [&](int slot) { srcs[slot] = w.at<char>(w.rank, w.partial_row(seq, t, slot)); });
    rows.sum_from_wire(out + t * rows.tensor_row_bytes(), srcs, n);
    if (!grad_topk_weights || !coop.leader()) continue;
    for (int k = 0; k < dims.num_topk(); ++k) {
      grad_topk_weights[t * dims.num_topk() + k] =
          sent[k] == kNowhere ? Weight(0) : *w.at<Weight>(w.rank, w.scalar(seq, t, send_first_k(sent[k])));
    }
  }
}

}  // namespace moe_rt
