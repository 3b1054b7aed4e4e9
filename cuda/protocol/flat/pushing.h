// Small batches are written to where they are read: lists and, of still fewer tokens, rows. A receiver then looks for
// nothing at its peers.
//
// A receiver that reads lists where their source keeps them waits for a peer three times before it knows which rows to
// read: for the counts, an entry of the pulls, its copies; and then for the rows. With few tokens that takes longer than
// moving them. So each segment has room for the lists of small batches from every source, and for their rows by source
// and token; sources write there, and not into their own windows, before they announce. Such a batch is known by its
// bound, which ranks compare: all choose alike.
#pragma once

#include "../core/coop.h"
#include "../core/dims.h"
#include "../core/plan.h"
#include "entries.h"

namespace moe_rt {

// Of a dispatch whose ranks send at most so many tokens each. Ranks that are not mapped fetch lists (device/rdma.h).
MOE_RT_FN bool pushes_lists(const World& w, int64_t max_tokens) {
  return w.mirror == nullptr && max_tokens <= w.shape.num_pushed_tokens;
}
MOE_RT_FN bool pushes_rows(const World& w, int64_t max_tokens) {
  return w.mirror == nullptr && max_tokens <= w.shape.num_pushed_rows;
}

// Where a source makes what it lists for each rank: in its own window for all, or where that rank reads it. An entry's
// place among all that the source lists is the same.
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
  // Ranks whose lists lie apart.
  MOE_RT_FN int32_t number() const { return pushed ? w.shape.num_ranks : 1; }
};

// Writes each token's row once to every rank that it visits; rows.publish_to codes it if it travels coded. Rows that
// their producer wrote into the own window are taken from there.
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
