// A CPU rank's partials of its own tokens, computed in cached scratch when reduce needs them.
//
// Pushed through the window they would be written to memory and read back: a fifth of combine's traffic with two ranks.
// They are coded and rounded as in the window, so the sum has the same bits. A GPU pushes them: its groups visit tokens
// in no fixed order, and their writes stay in its own memory.
#pragma once

#include <algorithm>

#include "../protocol/flat/combine.h"

namespace moe_rt {

template <class Dims, class Weight, class Rows>
struct LocalPartials {
  static constexpr bool kPushed = false;
  const World& w;
  int window;
  Returned<Weight> in;
  Rows rows;      // primitives whose stores stay in the cache
  char* scratch;  // a window row, private to this lane
  const Pulled *next = nullptr, *end = nullptr;
  int replaced = -1;  // slot of the last token's local partial

  // Own tokens are in token order; the lane's share is contiguous.
  void begin(const Range& tokens) {
    const RecvPlan::Head& head = *in.plan.head;
    const Pulled* const first = in.plan.pulled + head.first_own;
    end = first + head.num_own;
    next = std::partition_point(first, end, [&](const Pulled& p) { return p.token < tokens.begin; });
  }

  void put_instead(int64_t token, const char** srcs) {
    replaced = -1;
    if (next == end || next->token != token) return;
    sum_copies<Dims>(Solo{}, w, window, *next, in, scratch, rows, MappedLink{});
    replaced = next++->slot;
    srcs[replaced] = scratch;
  }

  // Prefetches the next token's partials. A sum also prefetches the lines that follow the ones it reads, which are the
  // same slot's next partial. So this covers only slots of the next token in which `token` reads nothing from the
  // window: it has n partials, and its local one is not read there.
  void prefetch_next(int64_t token, int n, int num_next) const {
    const int own = next != end && next->token == token + 1 ? next->slot : -1;
    for (int slot = 0; slot < num_next; ++slot) {
      const bool asked = slot < n && slot != replaced;
      if (!asked && slot != own) rows.prefetch(w.at<char>(w.rank, w.partial_row(window, token + 1, slot)));
    }
  }
};

}  // namespace moe_rt
