// The GPU's row primitives: a group of lanes moves or sums one row in vectors of up to 16 bytes.
//
// Lanes take neighbouring vectors, several at once, so that many loads are under way before the first is used. Sums are
// taken in the accumulator type, in the order given, and rounded once: the bits of the CPU engine. Coded rows
// (protocol/core/codec.h) go by teams of lanes, a block of 128 elements each: coded_rows.h.
#pragma once

#include "../protocol/core/dims.h"
#include "coded_rows.h"
#include "elements.h"
#include "moving.h"

namespace moe_rt {

// The widest vector that divides every row; run-time sizes are known too late to choose one.
template <class Dims>
struct VectorBytes {
  MOE_RT_FN static constexpr int of(int elem_bytes) { return elem_bytes; }
};
template <int kHidden, int kTopk, Codec kDispatch, Codec kCombine>
struct VectorBytes<FixedDims<kHidden, kTopk, kDispatch, kCombine>> {
  MOE_RT_FN static constexpr int of(int elem_bytes) {
    int bytes = 16;
    while (int64_t{kHidden} * elem_bytes % bytes != 0) bytes /= 2;
    return bytes < elem_bytes ? elem_bytes : bytes;
  }
};

template <class Elem, class Dims, class Group>
struct DeviceRows {
  using Acc = typename Elem::Acc;
  static constexpr int kBytes = VectorBytes<Dims>::of(sizeof(Elem));
  static constexpr int kElems = kBytes / int(sizeof(Elem));
  struct alignas(kBytes) Vector {
    Elem elem[kElems];
  };

  Dims dims;
  Group group;
  Codec codec;

  MOE_RT_FN int64_t tensor_row_bytes() const { return int64_t{dims.hidden()} * int64_t{sizeof(Elem)}; }
  MOE_RT_FN int64_t encoded_row_bytes() const { return codec_row_bytes(codec, dims.hidden(), sizeof(Elem)); }
  MOE_RT_FN int num_vectors() const { return dims.hidden() / kElems; }
  MOE_RT_FN static Acc element(const char* row, int i) { return reinterpret_cast<const Elem*>(row)[i].wide(); }
  MOE_RT_FN static const Vector* vectors(const char* row) { return reinterpret_cast<const Vector*>(row); }
  MOE_RT_FN static Vector* vectors(char* row) { return reinterpret_cast<Vector*>(row); }

  MOE_RT_FN void publish(char* dst, const char* x, int64_t row) const {
    const char* const src = x + row * tensor_row_bytes();
    if (codec != Codec::kRaw) {
      encode_row(group, codec, dims.hidden(), dst, [&](int i) { return float(element(src, i)); });
      return;
    }
    move_vectors<Vector>(group, num_vectors(), src, [&](auto&& to_row) { to_row(dst); });
  }

  MOE_RT_FN void clear(char* to, int64_t row) const {
    Vector* const dst = vectors(to + row * tensor_row_bytes());
    for (int at = group.lane(); at < num_vectors(); at += group.lanes()) dst[at] = Vector{};
  }

  // One row to n rows of `to`; those that are negative are left out. It is read once.
  MOE_RT_FN void spread(char* to, const int32_t* rows, int n, const char* src) const {
    if (codec != Codec::kRaw) {
      decode_row(group, codec, dims.hidden(), [&](int i, auto&& decoded) {
        const Elem x = Elem::round(Acc(decoded(src)));
        for_topk<Dims>(n, [&](int j) {
          if (rows[j] >= 0) reinterpret_cast<Elem*>(to + rows[j] * tensor_row_bytes())[i] = x;
        });
      });
      return;
    }
    move_vectors<Vector>(group, num_vectors(), src, [&](auto&& to_row) {
      for_topk<Dims>(n, [&](int i) {
        if (rows[i] >= 0) to_row(to + rows[i] * tensor_row_bytes());
      });
    });
  }

  MOE_RT_FN void encode_sum(char* dst, const char* const* srcs, const Acc* weights, int n) const {
    if (codec == Codec::kRaw) {
      weighted_sum(dst, srcs, [&](int i) { return weights[i]; }, n);
      return;
    }
    encode_row(group, codec, dims.hidden(), dst, [&](int at) {
      Acc sum = 0;
      for_topk<Dims>(n, [&](int i) {
        if (srcs[i]) sum += weights[i] * element(srcs[i], at);
      });
      return float(sum);
    });
  }

  MOE_RT_FN void decode_sum(char* dst, const char* const* srcs, int n) const {
    if (codec == Codec::kRaw) {
      weighted_sum(dst, srcs, [](int) { return Acc(1); }, n);
      return;
    }
    decode_row(group, codec, dims.hidden(), [&](int at, auto&& decoded) {
      Acc sum = 0;
      for_topk<Dims>(n, [&](int i) { sum += Acc(decoded(srcs[i])); });
      reinterpret_cast<Elem*>(dst)[at] = Elem::round(sum);
    });
  }

  // dst = sum of weight(i) * srcs[i]; sources that are nullptr add nothing.
  template <class WeightOf>
  MOE_RT_FN void weighted_sum(char* dst, const char* const* srcs, WeightOf&& weight, int n) const {
    for (int at = group.lane(); at < num_vectors(); at += group.lanes()) {
      Acc sum[kElems] = {};
      for_topk<Dims>(n, [&](int i) {
        if (!srcs[i]) return;
        const Vector v = vectors(srcs[i])[at];
        for (int e = 0; e < kElems; ++e) sum[e] += weight(i) * v.elem[e].wide();
      });
      Vector out;
      for (int e = 0; e < kElems; ++e) out.elem[e] = Elem::round(sum[e]);
      vectors(dst)[at] = out;
    }
  }

  // Row rows[i] of dst = weights[i] * g and dots[i] = <g, that row of y>, on every lane, but where rows[i] is negative.
  // g is read once. Two tensors and their rows take fewer registers than as many addresses.
  MOE_RT_FN void scale_dots(char* dst, const char* y, const int32_t* rows, const Acc* weights, const char* g, Acc* dots,
                            int n) const {
    for_topk<Dims>(n, [&](int i) { dots[i] = 0; });
    for (int at = group.lane(); at < num_vectors(); at += group.lanes()) {
      const Vector grad = vectors(g)[at];
      for_topk<Dims>(n, [&](int i) {
        if (rows[i] < 0) return;
        const int64_t place = int64_t{rows[i]} * num_vectors() + at;
        const Vector value = vectors(y)[place];
        Vector out;
        for (int e = 0; e < kElems; ++e) {
          dots[i] += grad.elem[e].wide() * value.elem[e].wide();
          out.elem[e] = Elem::round(weights[i] * grad.elem[e].wide());
        }
        vectors(dst)[place] = out;
      });
    }
    for_topk<Dims>(n, [&](int i) { dots[i] = group.sum(dots[i]); });
  }
};

}  // namespace moe_rt
