// A CPU rank's rows for its own tokens, which reduce takes when it needs them: partials, computed in cached scratch, or
// every row from the tensor it is in.
//
// Pushed through the window they would be written to memory and read back: a fifth of combine's traffic with two ranks.
// They are coded and rounded as in the window, so the sum has the same bits. A GPU pushes them: its groups visit tokens
// in no fixed order, and their writes stay in its own memory.
#pragma once

#include <algorithm>

#include "../protocol/flat/combine_entries.h"

namespace moe_rt {

// This rank's own pulled tokens, taken one after another by a lane whose share of all tokens is contiguous.
struct OwnTokens {
  const Pulled *next = nullptr, *end = nullptr;

  // Own tokens are in token order.
  void begin(const RecvPlan& plan, const Range& tokens) {
    const Pulled* const first = plan.pulled + plan.head->first_own;
    end = first + plan.head->num_own;
    next = std::partition_point(first, end, [&](const Pulled& p) { return p.token < tokens.begin; });
  }
  bool next_is(int64_t token) const { return next != end && next->token == token; }
};

template <class Dims, class Weight, class Rows>
struct LocalPartials {
  static constexpr bool kPushed = false;
  const World& w;
  int window;
  Returned<Weight> in;
  Rows rows;      // primitives whose stores stay in the cache
  char* scratch;  // a window row, private to this lane
  OwnTokens own{};
  int replaced = -1;  // slot of the last token's local partial

  void begin(const Range& tokens) { own.begin(in.plan, tokens); }

  void put_instead(int64_t token, const char** srcs) {
    replaced = -1;
    if (!own.next_is(token)) return;
    sum_copies<Dims>(Solo{}, w, window, *own.next, in, scratch, rows, MappedLink{});
    replaced = own.next++->slot;
    srcs[replaced] = scratch;
  }

  // Prefetches the next token's partials. A sum also prefetches the lines that follow the ones it reads, which are the
  // same slot's next partial. So this covers only slots of the next token in which `token` reads nothing from the
  // window: it has n partials, and its local one is not read there.
  void prefetch_next(int64_t token, int n, int num_next) const {
    const int local = own.next_is(token + 1) ? own.next->slot : -1;
    for (int slot = 0; slot < num_next; ++slot) {
      const bool asked = slot < n && slot != replaced;
      if (!asked && slot != local) rows.prefetch(w.at<char>(w.rank, w.partial_row(window, token + 1, slot)));
    }
  }
};

// Rows that return by entry and travel raw need no copy: weights are applied where rows are added. Only their scalars
// go through the window.
template <class Weight>
struct LocalEntries {
  static constexpr bool kPushed = false;
  const World& w;
  int window;
  Returned<Weight> in;
  int64_t tensor_row_bytes;
  OwnTokens own{};

  void begin(const Range& tokens) { own.begin(in.plan, tokens); }

  // `at` is the offset of a row's scalar.
  void put_instead(int64_t token, const char** srcs, int64_t at) {
    if (!own.next_is(token)) return;
    const Pulled& p = *own.next++;
    for (int32_t c = 0; c < p.copies; ++c) {
      const int32_t row = in.plan.row(p.first + c), k = in.plan.k(w.shape, p.first + c);
      if (!srcs[k]) continue;  // the send plan leaves it out
      srcs[k] = row == kDropped ? nullptr : in.y + row * tensor_row_bytes;
      *w.at<Weight>(w.rank, w.entry_row(window, token, k) + at) = scalar_of(in, row);
    }
  }
};

}  // namespace moe_rt
