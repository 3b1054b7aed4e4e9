// Row primitives of the GPU: a group of lanes moves or sums one row in vectors of up to 16 bytes.
//
// Neighbouring lanes take neighbouring vectors, several each, so that many loads are in flight before the first is
// used. Sums are in the accumulator type, in the order given, and rounded once: the bits of the CPU engine. Lanes take
// sixteen elements each of coded rows (protocol/core/codec.h): coded_rows.h.
#pragma once

#include "../protocol/core/dims.h"
#include "coded_rows.h"
#include "elements.h"
#include "moving.h"
#include "sums.h"

namespace moe_rt {

// Widest vector that divides every row. Run-time sizes are known too late to choose one.
template <class Dims>
struct VectorBytes {
  MOE_RT_FN static constexpr int of(int elem_bytes) { return elem_bytes; }
};
template <int kHidden, int kTopk, Codec kDispatch, Codec kCombine, Sums kSums>
struct VectorBytes<FixedDims<kHidden, kTopk, kDispatch, kCombine, kSums>> {
  MOE_RT_FN static constexpr int of(int elem_bytes) {
    int bytes = 16;
    while (int64_t{kHidden} * elem_bytes % bytes != 0) bytes /= 2;
    return bytes < elem_bytes ? elem_bytes : bytes;
  }
};

template <class ElemType, int kNum>
struct alignas(sizeof(ElemType) * kNum) RowVector {
  ElemType elem[kNum];
};

// Pieces of raw rows: a vector each.
template <class Elem, int kElems>
struct VectorFormat {
  using Acc = typename Elem::Acc;
  using Vector = RowVector<Elem, kElems>;
  using Piece = Loaded<Vector>;
  static constexpr int kSize = kElems, kAtOnce = tuning::kPiecesAtOnce, kTogether = tuning::kRowsTogether;
  MOE_RT_FN Piece load(const char* row, int at) const { return load_vector<Vector>(row, at); }
  MOE_RT_FN void widen(const Piece& piece, Acc* x) const {
    const Vector vector = unpacked<Vector>(piece);
    unrolled<kSize>([&](int k) { x[k] = vector.elem[k].wide(); });
  }
};

template <class Elem, class Dims, class Group, class Moving = ByLanes>
struct DeviceRows {
  using Acc = typename Elem::Acc;
  static constexpr int kBytes = VectorBytes<Dims>::of(sizeof(Elem));
  static constexpr int kElems = kBytes / int(sizeof(Elem));
  using Vector = RowVector<Elem, kElems>;

  Dims dims;
  Group group;
  Codec codec;
  Moving moving{};

  MOE_RT_FN int64_t tensor_row_bytes() const { return int64_t{dims.hidden()} * int64_t{sizeof(Elem)}; }
  MOE_RT_FN int64_t encoded_row_bytes() const { return codec_row_bytes(codec, dims.hidden(), sizeof(Elem)); }
  MOE_RT_FN bool coded() const { return codec != Codec::kRaw; }
  // Must be called before lanes read a row that they have written, or overwrite it. Each lane of a raw row only uses
  // its own pieces, so it needs no sync.
  MOE_RT_FN void meet() const {
    if (codec != Codec::kRaw) group.sync();
  }
  MOE_RT_FN void encode(char* dst, const char* src) const {
    publish_to(src, 0, [&](auto&& put) { put(dst); });
  }
  MOE_RT_FN int num_vectors() const { return dims.hidden() / kElems; }
  MOE_RT_FN static Acc element(const char* row, int i) { return reinterpret_cast<const Elem*>(row)[i].wide(); }
  MOE_RT_FN static const Vector* vectors(const char* row) { return reinterpret_cast<const Vector*>(row); }
  MOE_RT_FN static Vector* vectors(char* row) { return reinterpret_cast<Vector*>(row); }

  MOE_RT_FN void publish(char* dst, const char* x, int64_t row) const {
    publish_to(x + row * tensor_row_bytes(), row, [&](auto&& put) { put(dst); });
  }

  // Writes the row at src to each place that each_place passes to its argument; it is read and encoded once.
  template <class EachPlace>
  MOE_RT_FN void publish_to(const char* src, int64_t, EachPlace&& each_place) const {
    if (codec != Codec::kRaw) {
      encode<AtMost<1>>(each_place, &src, one, 1);
      return;
    }
    moving.template move<Vector>(group, num_vectors(), src, each_place);
  }

  MOE_RT_FN void clear(char* to, int64_t row) const {
    Vector* const dst = vectors(to + row * tensor_row_bytes());
    for (int at = group.lane(); at < num_vectors(); at += group.lanes()) dst[at] = Vector{};
  }

  // Writes one row to n rows of `to`, skipping negative ones. It is read once.
  MOE_RT_FN void spread(char* to, const int32_t* rows, int n, const char* src) const {
    const auto each_row = [&](auto&& put) {
      for_topk<Dims>(n, [&](int i) {
        if (rows[i] >= 0) put(to + rows[i] * tensor_row_bytes());
      });
    };
    if (codec != Codec::kRaw) {
      decode<AtMost<1>>(&src, one, 1, each_row);
      return;
    }
    moving.template move<Vector>(group, num_vectors(), src, each_row);
  }

  // dst = sum of weights[i] * srcs[i]; sources that are nullptr add nothing.
  MOE_RT_FN void encode_sum(char* dst, const char* const* srcs, const Acc* weights, int n) const {
    const auto weight = [&](int i, bool there) { return there ? weights[i] : Acc(0); };
    if (codec == Codec::kRaw) {
      weighted_sum(dst, srcs, weight, n);
    } else {
      encode<Dims>([&](auto&& put) { put(dst); }, srcs, weight, n);
    }
  }

  MOE_RT_FN void decode_sum(char* dst, const char* const* srcs, int n) const {
    if (codec == Codec::kRaw) {
      weighted_sum(dst, srcs, one, n);
    } else {
      decode<Dims>(srcs, one, n, [&](auto&& put) { put(dst); });
    }
  }
  // Like decode_sum, with weights; sources that are nullptr add nothing.
  MOE_RT_FN void decode_weighted(char* dst, const char* const* srcs, const Acc* weights, int n) const {
    const auto weight = [&](int i, bool there) { return there ? weights[i] : Acc(0); };
    if (codec == Codec::kRaw) {
      weighted_sum(dst, srcs, weight, n);
    } else {
      decode<Dims>(srcs, weight, n, [&](auto&& put) { put(dst); });
    }
  }

  // Row rows[i] of dst = weights[i] * g and dots[i] = <g, that row of y> on every lane, except for negative rows[i]. g
  // is read once. Two tensors and row indices take fewer registers than the same number of addresses.
  MOE_RT_FN void scale_dots(char* dst, const char* y, const int32_t* rows, const Acc* weights, const char* g, Acc* dots,
                            int n) const {
    with_count<min_of(tuning::kVectorsOfDots, Dims::kTopkBound)>(n, [&](auto count) {
      constexpr int kRows = decltype(count)::value;
      using Bound = conditional_t<(kRows < tuning::kVectorsOfDots), AtMost<kRows>, Dims>;
      scale_together<kRows, Bound>({dst, y, rows, weights, n}, g, dots);
    });
    for_topk<Dims>(n, [&](int i) { dots[i] = group.sum(dots[i]); });
  }

 private:
  MOE_RT_FN static Acc one(int, bool) { return 1; }

  // Operands of scale_dots, without g.
  struct Scaled {
    char* dst;
    const char* y;
    const int32_t* rows;
    const Acc* weights;
    int n;
  };

  // Scales all rows and computes this lane's part of their dots. In each pass over g a lane takes kEach of its vectors
  // and the same vectors of every row, kRows rows at a time: with kVectorsOfDots = 4, one row takes two vectors of g and
  // two of y in each pass, three rows one each, and more rows kRows at a time.
  template <int kRows, class Bound>
  MOE_RT_FN void scale_together(const Scaled& to, const char* g, Acc* dots) const {
    constexpr int kEach = tuning::kVectorsOfDots / (kRows + 1) > 0 ? tuning::kVectorsOfDots / (kRows + 1) : 1;
    Acc sums[round_up(Bound::kTopkBound, kRows)] = {};
    for (int first = group.lane(); first < num_vectors(); first += group.lanes() * kEach) {
      Loaded<Vector> grads[kEach];
      unrolled<kEach>([&](int e) {
        grads[e] = {};
        const int at = first + e * group.lanes();
        if (at < num_vectors()) grads[e] = load_vector<Vector>(g, at);
      });
      for_topk<Bound, kRows>(to.n, [&](int start) { scale_some<kRows, kEach, Bound>(to, start, first, grads, sums); });
    }
    for_topk<Bound>(to.n, [&](int i) { dots[i] = sums[i]; });
  }

  // Scales vectors `first`, first + lanes ... of kRows rows from `start` on, and adds to their sums. All vectors are
  // loaded before the first is used. Only loads and stores have branches, as in sums.h: a vector past the row's end, or
  // of a row that does not exist, is zeros, and adds zero to a sum.
  template <int kRows, int kEach, class Bound>
  MOE_RT_FN void scale_some(const Scaled& to, int start, int first, const Loaded<Vector>* grads, Acc* sums) const {
    const auto exists = [&](int i) { return i < Bound::kTopkBound && i < to.n && to.rows[i] >= 0; };
    const auto at = [&](int e) { return first + e * group.lanes(); };
    const auto place = [&](int i, int e) { return int64_t{to.rows[i]} * num_vectors() + at(e); };
    Loaded<Vector> values[kRows][kEach];
    unrolled<kRows * kEach>([&](int k) {
      const int row = k / kEach, e = k % kEach;
      values[row][e] = {};
      const bool kept = exists(start + row), inside = at(e) < num_vectors();
      if (kept & inside) values[row][e] = load_vector<Vector>(to.y, place(start + row, e));
    });
    unrolled<kRows * kEach>([&](int k) {
      const int row = k / kEach, e = k % kEach, i = start + row;
      const bool kept = exists(i), inside = at(e) < num_vectors();
      const Acc weight = kept ? to.weights[i] : Acc(0);
      const Vector out = scale_vector(weight, unpacked<Vector>(grads[e]), unpacked<Vector>(values[row][e]), sums[i]);
      if (kept & inside) vectors(to.dst)[place(i, e)] = out;
    });
  }

  // Returns weight * grad and adds <grad, value> to the sum.
  MOE_RT_FN static Vector scale_vector(Acc weight, const Vector& grad, const Vector& value, Acc& sum) {
    Vector out;
    unrolled<kElems>([&](int x) {
      sum += grad.elem[x].wide() * value.elem[x].wide();
      out.elem[x] = Elem::round(weight * grad.elem[x].wide());
    });
    return out;
  }

  template <class WeightOf>
  MOE_RT_FN void weighted_sum(char* dst, const char* const* srcs, WeightOf&& weight, int n) const {
    sum_rows<Dims>(group, VectorFormat<Elem, kElems>{}, num_vectors(), srcs, weight, n, [&](int at, const Acc* sum) {
      if (at < num_vectors()) vectors(dst)[at] = rounded(sum);
    });
  }
  MOE_RT_FN static Vector rounded(const Acc* x) {
    Vector out;
    unrolled<kElems>([&](int k) { out.elem[k] = Elem::round(x[k]); });
    return out;
  }

  MOE_RT_FN int64_t scales_at() const { return codec_parts(dims.hidden()).scales_at(); }
  MOE_RT_FN int num_pieces() const { return dims.hidden() / kCodesAtOnce; }

  // Writes the coded sum of weight(i) * srcs[i], of at most Bound::kTopkBound sources, to each place that each_place
  // passes to its argument.
  template <class Bound, class EachPlace, class WeightOf>
  MOE_RT_FN void encode(EachPlace&& each_place, const char* const* srcs, WeightOf&& weight, int n) const {
    if constexpr (Group::kTeamLanes % kLanesOfBlock == 0) {
      if (dims.hidden() % kCodesAtOnce == 0) {
        sum_rows<Bound>(group, ElementsFormat<Elem, Vector, kElems>{}, num_pieces(), srcs, weight, n,
                        [&](int at, const Acc* sum) {
                          encode_piece(group, codec, each_place, scales_at(), num_pieces(), at, sum);
                        });
        return;
      }
    }
    encode_row(group, codec, dims.hidden(), each_place, [&](int at) {
      Acc sum = 0;
      for_topk<Bound>(n, [&](int i) {
        if (srcs[i]) sum += weight(i, true) * element(srcs[i], at);
      });
      return float(sum);
    });
  }

  // Writes the sum of weight(i) times at most Bound::kTopkBound coded rows to each row that each_row passes to its
  // argument.
  template <class Bound, class WeightOf, class EachRow>
  MOE_RT_FN void decode(const char* const* srcs, WeightOf&& weight, int n, EachRow&& each_row) const {
    if (dims.hidden() % kCodesAtOnce == 0) {
      sum_rows<Bound>(
          group, CodesFormat<Acc>{codec, scales_at()}, num_pieces(), srcs, weight, n, [&](int at, const Acc* sum) {
            if (at >= num_pieces()) return;
            Vector out[kCodesAtOnce / kElems];
            unrolled<kCodesAtOnce / kElems>([&](int i) { out[i] = rounded(sum + i * kElems); });
            each_row([&](char* dst) {
              unrolled<kCodesAtOnce / kElems>([&](int i) { vectors(dst)[at * (kCodesAtOnce / kElems) + i] = out[i]; });
            });
          });
      return;
    }
    decode_row(group, codec, dims.hidden(), [&](int at, auto&& decoded) {
      Acc sum = 0;
      for_topk<Bound>(n, [&](int i) {
        if (srcs[i]) sum += weight(i, true) * Acc(decoded(srcs[i]));
      });
      const Elem x = Elem::round(sum);
      each_row([&](char* dst) { reinterpret_cast<Elem*>(dst)[at] = x; });
    });
  }
};

}  // namespace moe_rt
