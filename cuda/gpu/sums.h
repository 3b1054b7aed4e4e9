// Sums of several rows by a group of lanes: a lane loads its part of all rows before it uses the first.
//
// A lane takes a row piece by piece, as a Format defines: Format::Piece, the in-memory form, of kSize elements;
// load(row, at), the piece with index `at`; widen(piece, x), its elements; kAtOnce, the number of pieces that a lane
// has in flight; kTogether, the maximum number of rows, since registers are few. Elements are added in the order of the
// rows, so these numbers change no bit.
#pragma once

#include "../protocol/core/dims.h"

namespace moe_rt {

// Loaded bytes, in whole words: a GPU would unpack 16-bit elements when they arrive, and so wait for them. Vectors of
// fewer bytes, and elements that are not plain bits, stay unchanged.
template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t words[kBytes / 4];
};
template <class Vector>
constexpr bool kInWords = sizeof(Vector) % 4 == 0 && is_trivially_copyable_v<Vector>;
template <class Vector>
struct LoadedAs {
  using type = conditional_t<kInWords<Vector>, Words<kInWords<Vector> ? int(sizeof(Vector)) : 4>, Vector>;
};
template <class Vector>
using Loaded = typename LoadedAs<Vector>::type;

template <class Vector>
MOE_RT_FN Loaded<Vector> load_vector(const char* row, int64_t at) {
  return reinterpret_cast<const Loaded<Vector>*>(row)[at];
}
template <class Vector>
MOE_RT_FN Vector unpacked(const Loaded<Vector>& loaded) {
  if constexpr (kInWords<Vector>) {
    return __builtin_bit_cast(Vector, loaded);
  } else {
    return loaded;
  }
}

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// Maximum number of rows of a sum, if it is below a token's experts.
template <int kMost>
struct AtMost {
  static constexpr int kTopkBound = kMost;
  static constexpr bool kUnrolled = true;
};

// Calls fn(count) with a Count of 1, 2, 4 ... or kMost: the first that n does not exceed, or kMost.
template <int kMost, int kLeast = 1, class Fn>
MOE_RT_FN void with_count(int n, Fn&& fn) {
  if constexpr (kLeast < kMost) {
    if (n > kLeast) return with_count<kMost, min_of(2 * kLeast, kMost)>(n, fn);
  }
  fn(Count<kLeast>{});
}

// Pieces of up to kSources rows that a lane has in flight, kEach of each.
template <int kSources, int kEach, class Format, class Group>
struct Pieces {
  const Group& group;
  const Format& format;
  int first, num_pieces;
  typename Format::Piece pieces[kSources][kEach];

  MOE_RT_FN Pieces(const Group& g, const Format& f, int from, int num)
      : group(g), format(f), first(from), num_pieces(num) {}
  MOE_RT_FN int at(int e) const { return first + e * group.lanes(); }
  // has(i): true if source i exists, which is srcs[i].
  template <class Has>
  MOE_RT_FN void load(const char* const* srcs, Has&& has) {
    unrolled<kSources>([&](int i) {
      const bool there = has(i);
      unrolled<kEach>([&](int e) {
        pieces[i][e] = {};
        if (there & (at(e) < num_pieces)) pieces[i][e] = format.load(srcs[i], at(e));
      });
    });
  }
  // No branches, so that no compiler moves a use up to its load: a missing source adds zero times zero, and a sum that
  // began at zero is never the negative one.
  template <class Acc, class Has, class WeightOf>
  MOE_RT_FN void add(Acc* sum, int e, Has&& has, WeightOf&& weight) const {
    unrolled<kSources>([&](int i) {
      const Acc factor = weight(i, has(i));
      Acc x[Format::kSize];
      format.widen(pieces[i][e], x);
      unrolled<Format::kSize>([&](int k) { sum[k] += factor * x[k]; });
    });
  }
};

// Calls use(at, sum) for every piece of the sum of weight(i, true) * srcs[i], i < n. Sources that are nullptr are not
// read and add nothing: weight(i, false) must be finite. The lanes of a warp stay together and all call `use`, also for
// pieces past the last, which are zeros, so `use` may exchange words between lanes.
template <class Dims, class Format, class Group, class WeightOf, class Use>
MOE_RT_FN void sum_rows(const Group& group, const Format& format, int num_pieces, const char* const* srcs,
                        WeightOf&& weight, int n, Use&& use) {
  using Acc = typename Format::Acc;
  with_count<min_of(Format::kTogether, Dims::kTopkBound)>(n, [&](auto count) {
    constexpr int kSources = decltype(count)::value;
    constexpr bool kAll = kSources < Format::kTogether || Dims::kTopkBound <= kSources;
    constexpr int kEach = kAll && Format::kAtOnce > kSources ? Format::kAtOnce / kSources : 1;
    const int step = group.lanes() * kEach;
    for (int first = group.lane(); first - group.team_lane() < num_pieces; first += step) {
      Pieces<kSources, kEach, Format, Group> some(group, format, first, num_pieces);
      if constexpr (kAll) {
        const auto has = [&](int i) { return i < n && srcs[i]; };
        some.load(srcs, has);
        unrolled<kEach>([&](int e) {
          Acc sum[Format::kSize] = {};
          some.add(sum, e, has, weight);
          use(some.at(e), sum);
        });
      } else {  // more than are loaded together: kSources at a time
        Acc sum[Format::kSize] = {};
        for_topk<Dims, kSources>(n, [&](int start) {
          const auto has = [&](int i) { return start + i < Dims::kTopkBound && start + i < n && srcs[start + i]; };
          some.load(srcs + start, has);
          some.add(sum, 0, has, [&](int i, bool there) { return weight(start + i, there); });
        });
        use(first, sum);
      }
    }
  });
}

}  // namespace moe_rt
