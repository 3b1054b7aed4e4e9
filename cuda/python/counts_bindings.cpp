// Part of moe_rt._engine that counts for moe_rt.compat: tokens and entries of a routing, the received rows of a
// plan, and weights that return. Tensors are passed as addresses of contiguous memory; the caller has checked their
// shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "../protocol/core/plan.h"
#include "arguments.h"

namespace nb = nanobind;
using namespace moe_rt;

namespace {

// Counts of a routing [T][K] over E experts, of which each of R ranks has as many.
struct Routing {
  const int64_t* ids;
  int64_t num_tokens;
  int32_t num_topk, num_experts, num_ranks;
};
struct Counts {
  int32_t *per_rank, *per_expert;  // [R] tokens, [E] entries
  bool* in_rank;                   // [T][R]
};

// True if a token's first `n` entries name `id`.
bool names(const int64_t* ids, int32_t n, int64_t id) {
  bool named = false;
  for (int32_t k = 0; k < n; ++k) named |= ids[k] == id;
  return named;
}

// True if a token of [T][K] names an expert twice.
bool names_twice(Address ids, int64_t num_tokens, int32_t num_topk) {
  bool twice = false;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t* const own = at<const int64_t>(ids) + t * num_topk;
    for (int32_t k = 1; k < num_topk; ++k) twice |= own[k] >= 0 && names(own, k, own[k]);
  }
  return twice;
}

// Returns a copy of the ids [T][K], or None if a token names an expert twice.
std::optional<nb::bytes> copy_ids(Address ids, int64_t num_tokens, int32_t num_topk) {
  if (names_twice(ids, num_tokens, num_topk)) return std::nullopt;
  return nb::bytes(at<const void>(ids), num_tokens * num_topk * sizeof(int64_t));
}

// True if the ids, as many as were copied, are those of the copy.
bool ids_equal(const nb::bytes& copy, Address ids) {
  return std::memcmp(copy.data(), at<const void>(ids), copy.size()) == 0;
}

// Counts entries in [0, E). True if a token names an expert twice.
bool count(const Routing& r, const Counts& to) {
  std::fill_n(to.per_rank, r.num_ranks, 0);
  std::fill_n(to.per_expert, r.num_experts, 0);
  std::fill_n(to.in_rank, r.num_tokens * r.num_ranks, false);
  std::vector<int32_t> owner(r.num_experts);  // a division for each entry would take longer than all the rest
  for (int32_t e = 0; e < r.num_experts; ++e) owner[e] = e / (r.num_experts / r.num_ranks);
  bool repeats = false;
  for (int64_t t = 0; t < r.num_tokens; ++t) {
    const int64_t* const ids = r.ids + t * r.num_topk;
    bool* const visits = to.in_rank + t * r.num_ranks;
    for (int32_t k = 0; k < r.num_topk; ++k) {
      if (!below(ids[k], r.num_experts)) continue;
      ++to.per_expert[ids[k]];
      repeats |= names(ids, k, ids[k]);
      bool& visited = visits[owner[ids[k]]];
      to.per_rank[owner[ids[k]]] += !visited;
      visited = true;
    }
  }
  return repeats;
}

bool counts_differ(const Routing& r, const Counts& given) {
  std::vector<int32_t> per_rank(r.num_ranks), per_expert(r.num_experts);
  const auto in_rank = std::make_unique<bool[]>(r.num_tokens * r.num_ranks);
  return count(r, {per_rank.data(), per_expert.data(), in_rank.get()}) ||
         !std::equal(per_rank.begin(), per_rank.end(), given.per_rank) ||
         !std::equal(per_expert.begin(), per_expert.end(), given.per_expert) ||
         !std::equal(in_rank.get(), in_rank.get() + r.num_tokens * r.num_ranks, given.in_rank);
}

// Widens local expert ids [n] to 64 bits. Returns each local expert's number of entries, rounded up.
std::vector<int64_t> widen_ids(Address ids, int64_t n, int64_t num_local, int64_t alignment, Address out) {
  std::vector<int64_t> counts(num_local);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = at<int64_t>(out)[i] = at<const int32_t>(ids)[i];
    if (below(id, num_local)) ++counts[id];
  }
  for (int64_t& each : counts) each = round_up(each, alignment);
  return counts;
}

// Calls fn(pulled, row) for each row that a dispatch has delivered.
template <class Fn>
void each_row(Address plan, const Shape& shape, int64_t num_local, Fn fn) {
  const RecvPlan p = RecvPlan::view(at<int32_t>(plan), shape, int32_t(num_local));
  for (int32_t i = 0; i < p.head->num_pulled; ++i) {
    const Pulled& pulled = p.pulled[i];
    for (int32_t c = 0; c < pulled.copies; ++c) {
      if (const int32_t row = p.rows[pulled.first + c]; row >= 0) fn(pulled, row);
    }
  }
}

// Describes the rows of a dispatch with expert_rows: the source's token of each row [L][expert_rows], and [L][R], begin
// << 32 | count of the rows from each source.
void describe_rows(Address plan, const Shape& shape, int64_t num_local, int64_t expert_rows, Address tokens,
                   Address ranges) {
  const int64_t num_ranks = shape.num_ranks;
  const auto slots = int32_t(expert_rows);
  int64_t* const range = at<int64_t>(ranges);
  std::fill_n(range, num_local * num_ranks, 0);
  each_row(plan, shape, num_local, [&](const Pulled& pulled, int32_t row) {
    at<int32_t>(tokens)[row] = pulled.token;
    ++range[row / slots * num_ranks + pulled.source];
  });
  for (int64_t e = 0; e < num_local; ++e) {
    int64_t begin = 0;
    for (int64_t* each = range + e * num_ranks; each != range + (e + 1) * num_ranks; ++each) {
      const int64_t n = *each;
      *each = begin << 32 | n;
      begin += n;
    }
  }
}

// Copies scales of `words` 32-bit words per row to [L][words][expert_rows].
void put_in_columns(Address plan, const Shape& shape, int64_t num_local, int64_t expert_rows, Address scales,
                    Address columns, int64_t words) {
  const auto slots = int32_t(expert_rows);
  each_row(plan, shape, num_local, [&](const Pulled&, int32_t row) {
    int32_t* const to = at<int32_t>(columns) + row / slots * words * slots + row % slots;
    for (int64_t i = 0; i < words; ++i) to[i * slots] = at<const int32_t>(scales)[row * words + i];
  });
}

// Writes the source rank of each of n received rows, which follow each other by source; -1 past the last one.
void source_ranks(Address offs, int32_t num_ranks, int64_t n, Address out) {
  int64_t row = 0;
  for (int32_t source = 0; source < num_ranks; ++source) {
    const int64_t end = std::min<int64_t>(at<const int32_t>(offs)[source], n);
    for (; row < end; ++row) at<int64_t>(out)[row] = source;
  }
  std::fill(at<int64_t>(out) + row, at<int64_t>(out) + n, -1);
}

// Writes out [T][K]: the sum, in rank order, of the weights that each rank returned for the token. Rows
// [offs[R - 1]][wide] follow each other by rank, then by token; in_rank [T][R] says which tokens a rank returns.
void add_weights(Address rows, int64_t wide, Address offs, Address in_rank, int64_t num_tokens, int32_t num_ranks,
                 int64_t num_topk, Address out) {
  std::fill_n(at<float>(out), num_tokens * num_topk, 0.0f);
  int64_t row = 0;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t end = at<const int32_t>(offs)[rank];
    for (int64_t t = 0; t < num_tokens && row < end; ++t) {
      if (!at<const bool>(in_rank)[t * num_ranks + rank]) continue;
      const float* const weights = at<const float>(rows) + row++ * wide;
      for (int64_t k = 0; k < num_topk; ++k) at<float>(out)[t * num_topk + k] += weights[k];
    }
    row = end;
  }
}

template <class Fn>
auto with_addresses(Fn fn) {
  return [fn](Address ids, int64_t num_tokens, int32_t num_topk, int32_t num_experts, int32_t num_ranks,
              Address per_rank, Address per_expert, Address in_rank) {
    return fn(Routing{at<const int64_t>(ids), num_tokens, num_topk, num_experts, num_ranks},
              Counts{at<int32_t>(per_rank), at<int32_t>(per_expert), at<bool>(in_rank)});
  };
}

}  // namespace

void bind_counts(nb::module_& m) {
  m.def("count_routing", with_addresses(count), nb::arg("topk_idx"), nb::arg("num_tokens"), nb::arg("num_topk"),
        nb::arg("num_experts"), nb::arg("num_ranks"), nb::arg("per_rank"), nb::arg("per_expert"), nb::arg("in_rank"));
  m.def("counts_differ", with_addresses(counts_differ), nb::arg("topk_idx"), nb::arg("num_tokens"), nb::arg("num_topk"),
        nb::arg("num_experts"), nb::arg("num_ranks"), nb::arg("per_rank"), nb::arg("per_expert"), nb::arg("in_rank"));
  m.def("names_twice", names_twice, nb::arg("topk_idx"), nb::arg("num_tokens"), nb::arg("num_topk"));
  m.def("copy_ids", copy_ids, nb::arg("topk_idx"), nb::arg("num_tokens"), nb::arg("num_topk"));
  m.def("ids_equal", ids_equal, nb::arg("copy"), nb::arg("topk_idx"));
  m.def("widen_ids", widen_ids, nb::arg("ids"), nb::arg("num_entries"), nb::arg("num_local"), nb::arg("alignment"),
        nb::arg("out"));
  m.def("describe_rows", describe_rows, nb::arg("recv_plan"), nb::arg("shape"), nb::arg("num_local"),
        nb::arg("expert_rows"), nb::arg("tokens"), nb::arg("ranges"));
  m.def("source_ranks", source_ranks, nb::arg("offs"), nb::arg("num_ranks"), nb::arg("num_rows"), nb::arg("out"));
  m.def("add_weights", add_weights, nb::arg("rows"), nb::arg("wide"), nb::arg("offs"), nb::arg("in_rank"),
        nb::arg("num_tokens"), nb::arg("num_ranks"), nb::arg("num_topk"), nb::arg("out"));
  m.def("put_in_columns", put_in_columns, nb::arg("recv_plan"), nb::arg("shape"), nb::arg("num_local"),
        nb::arg("expert_rows"), nb::arg("scales"), nb::arg("columns"), nb::arg("words"));
}
