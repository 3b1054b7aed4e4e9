// Push of small batches: sources write lists and, for still fewer tokens, rows into the receiver's segment, so that a
// receiver needs no read from its peers.
//
// A receiver that reads lists in the source's window waits for that peer three times before it knows which rows to
// read: for the counts, for an entry of the pulls, and for its copies. The rows are a fourth wait. With few tokens this
// takes longer than moving them. Each segment therefore has space for the lists of small batches from every source, and
// for their rows by source and token. Sources write there before they announce, and not into their own windows. The
// bound of a dispatch decides whether it is small. Ranks compare it, so all choose alike.
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"
#include "entries.h"

namespace moe_rt {

// True if every rank sends at most num_pushed_tokens (or num_pushed_rows) tokens in this dispatch, so that lists (or
// rows) are pushed. Ranks with unmapped peers fetch lists instead (gpu/rdma.h).
MOE_RT_FN bool pushes_lists(const World& w, int64_t max_tokens) {
  return w.mirror == nullptr && max_tokens <= w.shape.num_pushed_tokens;
}
MOE_RT_FN bool pushes_rows(const World& w, int64_t max_tokens) {
  return w.mirror == nullptr && max_tokens <= w.shape.num_pushed_rows;
}

// Lists that a source writes for each rank: in its own window for all, or in each receiver's segment. An entry's index
// is the same in both cases.
template <class Weight>
struct ListsFor {
  const World& w;
  char* const* base;
  int window;
  bool pushed;
  MOE_RT_FN RouteLists<Weight> operator()(int32_t receiver) const {
    return pushed ? RouteLists<Weight>::pushed(w, base[receiver], w.rank, window)
                  : RouteLists<Weight>::view(w, w.rank, window);
  }
  // Number of separate places that hold the lists.
  MOE_RT_FN int32_t count() const { return pushed ? w.shape.num_ranks : 1; }
};

// Writes each token's row once to every rank that it visits; rows.publish_to encodes rows that travel coded. Rows that
// their producer wrote into the own window are read there.
template <class Dims, class Coop, class Rows>
MOE_RT_FN void push_rows(const Coop& coop, const Dims& dims, const World& w, const RoutingTables& tables,
                         const ExpertIds& topk_idx, int window, const char* x, int64_t num_tokens, const Rows& rows) {
  const bool in_window = x == w.at<const char>(w.rank, w.token_row(window, 0));
  const int64_t stride = in_window ? w.shape.row_bytes() : rows.tensor_row_bytes();
  const Range tokens = coop.share(num_tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t += tokens.step) {
    int32_t to[Dims::kTopkBound];
    for_topk<Dims>(dims.num_topk(), [&](int k) { to[k] = owner_of(tables.entry(topk_idx[t * dims.num_topk() + k])); });
    for_topk<Dims>(dims.num_topk(), [&](int k) {
      for_topk<Dims>(k, [&](int j) {
        if (to[j] == to[k]) to[k] = -1;
      });
    });
    const int64_t place = w.pushed_row(window, w.rank, t);
    rows.publish_to(x + t * stride, t, [&](auto&& put) {
      for_topk<Dims>(dims.num_topk(), [&](int k) {
        if (to[k] >= 0) put(tables.base[to[k]] + place);
      });
    });
  }
}

}  // namespace moe_rt
