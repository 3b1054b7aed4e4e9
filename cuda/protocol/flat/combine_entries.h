// Roles of combine-type ops with Sums::kInvariant: every row returns to its source by itself, unweighted, and the source
// adds a token's rows in the order of its top-k entries.
//
//   combine             push_entries (rows, weights) | wait | reduce_entries   of weight * row
//   dispatch backward   push_entries (rows, scalars) | wait | reduce_entries   and the gradient of each routing weight
// A sum then depends on the token's own rows and weights only: not on ranks, nodes, placement or lanes. A row travels
// with its scalar after it, so that one put moves both. `Rows` is as in combine.h, and has publish(dst, y, row) of
// dispatch.h and decode_weighted(dst, srcs, weights, n), which sums in the order given and skips sources that are
// nullptr.
#pragma once

#include "combine.h"

namespace moe_rt {

// Offset of the scalar after a row of this many bytes.
template <class Weight>
MOE_RT_FN constexpr int64_t scalar_at(int64_t row_bytes) {
  return round_up(row_bytes, int64_t{sizeof(Weight)});
}
template <class Weight>
MOE_RT_FN constexpr int64_t entry_bytes(int64_t row_bytes) {
  return scalar_at<Weight>(row_bytes) + int64_t{sizeof(Weight)};
}

// Returns the scalar that travels with a row of recv_x: its weight in a combine, its weight's gradient in a dispatch
// backward, 0 if the row was dropped.
template <class Weight>
MOE_RT_FN Weight scalar_of(const Returned<Weight>& in, int32_t row) {
  const Weight* const scalars = in.scalars ? in.scalars : in.weights;
  if (row == kDropped) return Weight(0);
  return scalars ? scalars[row] : Weight(1);
}

// Pushes the rows of all pulled tokens or, unless Own::kPushed, only those of other ranks' tokens. A dropped row
// returns as zeros, because only this rank knows that it was dropped.
template <class Own, class Coop, class Weight, class Rows, class Link>
MOE_RT_FN void push_entries(const Coop& coop, const World& w, int window, const Returned<Weight>& in, const Rows& rows,
                            const Link& link) {
  const RecvPlan::Head& head = *in.plan.head;
  const int32_t left_out = Own::kPushed ? 0 : head.num_own;
  const int64_t row_bytes = rows.encoded_row_bytes();
  const Range share = coop.share(head.num_pulled - left_out);
  for (int64_t i = share.begin; i < share.end; i += share.step) {
    const Pulled p = read_once(in.plan.pulled[i < head.first_own ? i : i + left_out]);
    if (!in.plan.can_follow(w, p)) continue;
    for (int32_t c = 0; c < p.copies; ++c) {
      const int32_t row = in.plan.row(p.first + c);
      const int64_t home = w.entry_row(window, p.token, in.plan.k(w.shape, p.first + c));
      char* const dst = link.target_row(w, p.source, home);
      if (row == kDropped) {
        const char* nothing = nullptr;
        Weight zero = 0;
        rows.encode_sum(dst, &nothing, &zero, 1);
      } else {
        rows.publish(dst, in.y, row);
      }
      if (coop.leader()) *reinterpret_cast<Weight*>(dst + scalar_at<Weight>(row_bytes)) = scalar_of(in, row);
      link.deliver(w, p.source, home, entry_bytes<Weight>(row_bytes));
    }
  }
}

// out[t] = sum of the token's rows in the order of its entries, weighted unless grad_topk_weights [T][K] is there to be
// filled: by topk_weights [T][K], or by the weights that travelled if these are nullptr. A repeated expert has one row,
// at its first entry. `own` is LocalPushed, or takes the rows of this rank's own tokens from its tensors
// (cpu/local_partials.h).
template <class Coop, class Dims, class Weight, class Rows, class Own>
MOE_RT_FN void reduce_entries(const Coop& coop, const Dims& dims, const World& w, int window, const int32_t* send_plan,
                              int64_t num_tokens, char* out, const Weight* topk_weights, Weight* grad_topk_weights,
                              const Rows& rows, Own own) {
  const char* srcs[Dims::kTopkBound];
  Weight factors[Dims::kTopkBound];
  const int64_t at = scalar_at<Weight>(rows.encoded_row_bytes());
  const Range share = coop.share(num_tokens);
  if constexpr (!Own::kPushed) own.begin(share);
  for (int64_t t = share.begin; t < share.end; t += share.step) {
    const int32_t* sent = send_plan + t * dims.num_topk();
    const auto entry = [&](int k) { return w.at<const char>(w.rank, w.entry_row(window, t, k)); };
    const auto scalar = [&](int k) { return *reinterpret_cast<const Weight*>(entry(k) + at); };
    for_topk<Dims>(dims.num_topk(), [&](int k) {
      const bool has_row = sent[k] != kNowhere && send_first_k(sent[k]) == k;
      srcs[k] = has_row ? entry(k) : nullptr;
    });
    if constexpr (!Own::kPushed) own.put_instead(t, srcs, at);
    for_topk<Dims>(dims.num_topk(), [&](int k) {
      factors[k] = Weight(1);
      if (srcs[k] && !grad_topk_weights) factors[k] = topk_weights ? topk_weights[t * dims.num_topk() + k] : scalar(k);
    });
    rows.decode_weighted(out + t * rows.tensor_row_bytes(), srcs, factors, dims.num_topk());
    if (!grad_topk_weights || !coop.leader()) continue;
    for (int k = 0; k < dims.num_topk(); ++k) {
      grad_topk_weights[t * dims.num_topk() + k] = sent[k] == kNowhere ? Weight(0) : scalar(send_first_k(sent[k]));
    }
  }
}

}  // namespace moe_rt
