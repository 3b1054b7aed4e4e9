// A CPU rank's partials of its own tokens, made in cached scratch when reduce comes to them.
//
// Pushed through the window they would be written to memory and read back: a fifth of what combine moves with two
// ranks. They are coded and rounded as in the window, so the sum has the same bits. A GPU pushes them: its groups walk
// the tokens in no order, and what they write stays in its own memory.
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
  Rows rows;      // with stores that stay in the cache
  char* scratch;  // a row as in the window, of this lane alone
  const Pulled *next = nullptr, *end = nullptr;
  int replaced = -1;  // slot of the last token's local partial

  // Own tokens are listed in their order; the lane's share is contiguous.
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

  // A sum also asks for the lines after those that it reads: the same slot's next partial. This asks for the next
  // token's where `token` reads nothing before it in the window, having n partials or its own in that slot.
  void prefetch_next(int64_t token, int n, int num_next) const {
    const int own = next != end && next->token == token + 1 ? next->slot : -1;
    for (int slot = 0; slot < num_next; ++slot) {
      const bool asked = slot < n && slot != replaced;
      if (!asked && slot != own) rows.prefetch(w.at<char>(w.rank, w.partial_row(window, token + 1, slot)));
    }
  }
};

}  // namespace moe_rt
