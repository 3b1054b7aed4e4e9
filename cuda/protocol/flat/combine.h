// Roles of combine-type ops: sum a token's rows here, push the partial to its source, then add up the partials at home.
//
//   combine             push (weights)        | wait | reduce
//   dispatch backward   push (unit weights)   | wait | reduce   and the gradient of each routing weight: (token, k)
// `Rows` is the row primitive. encode_sum(dst, srcs, weights, n) skips sources that are nullptr; decode_sum(dst, srcs,
// n) sums in the order given, in the accumulator type. `Link` reaches a peer's segment (link.h).
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/link.h"
#include "../core/plan.h"

namespace moe_rt {

// Inputs of a combine-type op: rows, a weight per row (1 if nullptr), and a scalar per row (none if nullptr). With
// RecvLayout::kTokens a row has a scalar for each of its K entries.
template <class Weight>
struct Returned {
  RecvPlan plan;
  const char* y;
  const Weight *weights, *scalars;
};

// Writes one pulled token's partial to dst and puts its rows' scalars into the source's segment. Dropped rows add
// nothing.
template <class Dims, class Coop, class Weight, class Rows, class Link>
MOE_RT_FN void sum_copies(const Coop& coop, const World& w, int window, const Pulled& p, const Returned<Weight>& in,
                          char* dst, const Rows& rows, const Link& link) {
  const char* srcs[Dims::kTopkBound];
  Weight factors[Dims::kTopkBound];
  const int64_t shared_row = w.shape.by_token() ? in.plan.row(p.first) : 0;
  for_topk<Dims>(p.copies, [&](int c) {
    const int64_t row = in.plan.row(p.first + c);
    const bool kept = row != kDropped;
    if (in.scalars && coop.leader()) {
      const int32_t k = in.plan.k(w.shape, p.first + c);
      const int64_t entry = !w.shape.by_token()      ? row
                            : shared_row == kDropped ? kDropped
                                                     : shared_row * w.shape.num_topk + k;
      link.put(w, p.source, w.scalar(window, p.token, k), entry == kDropped ? Weight(0) : in.scalars[entry]);
    }
    srcs[c] = kept ? in.y + row * rows.tensor_row_bytes() : nullptr;
    factors[c] = kept && in.weights ? in.weights[row] : Weight(1);
  });
  rows.encode_sum(dst, srcs, factors, p.copies);
}

// Pushes the partials of all pulled tokens or, unless Own::kPushed, only those of other ranks' tokens.
template <class Own, class Coop, class Dims, class Weight, class Rows, class Link>
MOE_RT_FN void push(const Coop& coop, const Dims&, const World& w, int window, const Returned<Weight>& in,
                    const Rows& rows, const Link& link) {
  const RecvPlan::Head& head = *in.plan.head;
  const int32_t left_out = Own::kPushed ? 0 : head.num_own;
  const Range share = coop.share(head.num_pulled - left_out);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    const Pulled p = read_once(in.plan.pulled[i < head.first_own ? i : i + left_out]);
    if (!in.plan.can_follow(w, p)) continue;
    const int64_t home = w.partial_row(window, p.token, p.slot);
    sum_copies<Dims>(coop, w, window, p, in, link.target_row(w, p.source, home), rows, link);
    link.deliver(w, p.source, home, rows.encoded_row_bytes());
  }
}

// Partials of this rank's own tokens go through its window, as all others do.
struct LocalPushed {
  static constexpr bool kPushed = true;
};

// out[t] = sum of the token's partials in rank order; grad_topk_weights [T][K] is filled when not nullptr. `own` is
// LocalPushed, or computes each local partial when its token is summed (cpu/local_partials.h).
template <class Coop, class Dims, class Weight, class Rows, class Own>
MOE_RT_FN void reduce(const Coop& coop, const Dims& dims, const World& w, int window, const int32_t* send_plan,
                      int64_t num_tokens, char* out, Weight* grad_topk_weights, const Rows& rows, Own own) {
  const char* srcs[Dims::kTopkBound];
  const Range share = coop.share(num_tokens);
  if constexpr (!Own::kPushed) own.begin(share);
  for (int64_t t = share.begin; t < share.end; t += share.step) {
    const int32_t* sent = send_plan + t * dims.num_topk();
    const int n = num_partials(sent, dims.num_topk());
    for_topk<Dims>(n, [&](int slot) { srcs[slot] = w.at<char>(w.rank, w.partial_row(window, t, slot)); });
    if constexpr (!Own::kPushed) {
      own.put_instead(t, srcs);
      if (t + 1 < share.end) own.prefetch_next(t, n, num_partials(sent + dims.num_topk(), dims.num_topk()));
    }
    rows.decode_sum(out + t * rows.tensor_row_bytes(), srcs, n);
    if (!grad_topk_weights || !coop.leader()) continue;
    for (int k = 0; k < dims.num_topk(); ++k) {
      grad_topk_weights[t * dims.num_topk() + k] =
          sent[k] == kNowhere ? Weight(0) : *w.at<Weight>(w.rank, w.scalar(window, t, send_first_k(sent[k])));
    }
  }
}

}  // namespace moe_rt
