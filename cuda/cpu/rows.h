// Row primitives of the CPU: one table of functions per instruction set and element type, chosen when an engine is
// created.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <vector>

#include "../protocol/core/dims.h"
#include "../protocol/core/layout.h"
#include "../protocol/core/tuning.h"

namespace moe_rt::rows {

enum class Elem : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
// Names of each element type in torch and in gpu/elements.h, in the order of Elem. Python's tables come from here.
struct ElemNames {
  const char *torch, *device;
};
inline constexpr ElemNames kElemNames[] = {
    {"float32", "F32"}, {"bfloat16", "Bf16"}, {"float16", "F16"}, {"float64", "F64"}};
inline constexpr int kNumElems = std::size(kElemNames);

// Each function works on `hidden` elements. Sums are in fp32 (fp64 for fp64), in the order given, and rounded once, to
// nearest even. No fused multiply-add is contracted, so every instruction set gives the same bits.
template <class Acc>
struct Functions {
  void (*weighted_sum)(char* dst, const char* const* srcs, const Acc* weights, int n, int64_t hidden, bool stream);
  Acc (*scale_dot)(char* dst, Acc weight, const char* g, const char* y, int64_t hidden, bool stream);
  // Coded rows (protocol/core/codec.h); nullptr for fp64, which is never coded. encode_sum encodes the weighted sum of
  // rows, decode_sum rounds the weighted sum of coded rows.
  void (*encode_sum)(Codec codec, char* dst, const char* const* srcs, const Acc* weights, int n, int64_t hidden);
  void (*decode_sum)(Codec codec, char* dst, const char* const* srcs, const Acc* weights, int n, int64_t hidden);
};

struct Table {
  const char* name;
  tuning::StreamShares stream;
  int64_t prefetch_distance;  // bytes between a load and the line prefetched with it
  // Copies to each of n destinations, skipping nullptr; n <= kMaxTopk.
  void (*copy)(char* const* dsts, int n, const char* src, int64_t bytes, bool stream);
  // Indexed by Elem; empty if the element sums in the other type.
  Functions<float> in_floats[kNumElems];
  Functions<double> in_doubles[kNumElems];

  template <class Acc>
  const Functions<Acc>& functions(Elem elem) const {
    if constexpr (std::is_same_v<Acc, double>) {
      return in_doubles[static_cast<int>(elem)];
    } else {
      return in_floats[static_cast<int>(elem)];
    }
  }
};

// `isa` is "auto", "portable", "avx2" or "avx512"; nullptr if this machine or build lacks it.
const Table* find_table(const char* isa);

// Addresses of n rows of a tensor, for Table::copy; nullptr for negative rows.
struct Places {
  char* dsts[kMaxTopk];
  Places(char* tensor, int64_t row_bytes, const int32_t* rows, int n) {
    for (int i = 0; i < n; ++i) dsts[i] = rows[i] < 0 ? nullptr : tensor + rows[i] * row_bytes;
  }
};

// Row primitive that role functions take: one element type, one row length, streaming or not.
template <class Acc>
struct HostRows {
  const Table* table;
  const Functions<Acc>* fn;
  int64_t hidden, elem_bytes;
  // Streaming stores bypass the caches, which is faster once the rows written exceed what the caches would keep.
  bool stream;
  Codec codec;

  int64_t tensor_row_bytes() const { return hidden * elem_bytes; }
  int64_t encoded_row_bytes() const { return codec_row_bytes(codec, hidden, elem_bytes); }
  bool coded() const { return codec != Codec::kRaw; }
  void meet() const {}  // a row belongs to one lane
  void publish(char* dst, const char* x, int64_t row) const {
    const char* const src = x + row * tensor_row_bytes();
    if (coded()) return encode(dst, src);
    table->copy(&dst, 1, src, tensor_row_bytes(), stream);
  }
  void encode(char* dst, const char* src) const {
    const Acc one = 1;
    fn->encode_sum(codec, dst, &src, &one, 1, hidden);
  }
  void clear(char* to, int64_t row) const { std::memset(to + row * tensor_row_bytes(), 0, tensor_row_bytes()); }
  void spread(char* to, const int32_t* rows, int n, const char* src) const {
    const Places places(to, tensor_row_bytes(), rows, n);
    if (codec == Codec::kRaw) return table->copy(places.dsts, n, src, tensor_row_bytes(), stream);
    for (int i = 0; i < n; ++i) {
      if (places.dsts[i]) fn->decode_sum(codec, places.dsts[i], &src, ones(), 1, hidden);
    }
  }
  // The arrays are the caller's scratch: this function removes sources that are nullptr from them.
  void encode_sum(char* dst, const char** srcs, Acc* weights, int n) const {
    const int kept = without_missing(srcs, weights, n);
    if (codec == Codec::kRaw) {
      fn->weighted_sum(dst, srcs, weights, kept, hidden, stream);
    } else {
      fn->encode_sum(codec, dst, srcs, weights, kept, hidden);
    }
  }
  void decode_sum(char* dst, const char* const* srcs, int n) const {
    if (codec == Codec::kRaw) {
      fn->weighted_sum(dst, srcs, ones(), n, hidden, stream);
    } else {
      fn->decode_sum(codec, dst, srcs, ones(), n, hidden);
    }
  }
  // The arrays are scratch, as in encode_sum.
  void decode_weighted(char* dst, const char** srcs, Acc* weights, int n) const {
    const int kept = without_missing(srcs, weights, n);
    if (codec == Codec::kRaw) {
      fn->weighted_sum(dst, srcs, weights, kept, hidden, stream);
    } else {
      fn->decode_sum(codec, dst, srcs, weights, kept, hidden);
    }
  }
  // Prefetches the lines of a row that no sum prefetches in time.
  void prefetch(const char* row) const {
    const int64_t bytes = min_of(table->prefetch_distance, encoded_row_bytes());
    for (int64_t i = 0; i < bytes; i += kRowAlign) __builtin_prefetch(row + i);
  }
  // g is in the cache after the first row.
  void scale_dots(char* dst, const char* y, const int32_t* rows, const Acc* weights, const char* g, Acc* dots,
                  int n) const {
    for (int i = 0; i < n; ++i) {
      if (rows[i] < 0) continue;
      const int64_t at = rows[i] * tensor_row_bytes();
      dots[i] = fn->scale_dot(dst + at, weights[i], g, y + at, hidden, stream);
    }
  }

 private:
  // Removes sources that are nullptr, and their weights; returns the number of the others.
  static int without_missing(const char** srcs, Acc* weights, int n) {
    int kept = 0;
    for (int i = 0; i < n; ++i) {
      if (!srcs[i]) continue;
      srcs[kept] = srcs[i];
      weights[kept++] = weights[i];
    }
    return kept;
  }
  static const Acc* ones() {
    static const std::vector<Acc> all(kMaxTopk, Acc(1));
    return all.data();
  }
};

// Rows of two tensors, codes and their scales, which dispatch moves as bytes: only experts interpret them. It has the
// interface of HostRows for dispatch: `x` and `to` of its calls are codes, and rows of the same index here are their
// scales.
struct HostScaledRows {
  const Table* table;
  RowParts parts;
  const char* scales;
  char* recv_scales;
  bool stream;

  int64_t encoded_row_bytes() const { return parts.bytes(); }
  void publish(char* dst, const char* x, int64_t row) const {
    char* const scales_dst = dst + parts.scales_at();
    table->copy(&dst, 1, x + row * parts.code_bytes, parts.code_bytes, stream);
    table->copy(&scales_dst, 1, scales + row * parts.scale_bytes, parts.scale_bytes, stream);
  }
  void clear(char* to, int64_t row) const {
    std::memset(to + row * parts.code_bytes, 0, parts.code_bytes);
    std::memset(recv_scales + row * parts.scale_bytes, 0, parts.scale_bytes);
  }
  void spread(char* to, const int32_t* rows, int n, const char* src) const {
    const Places codes_to(to, parts.code_bytes, rows, n), scales_to(recv_scales, parts.scale_bytes, rows, n);
    table->copy(codes_to.dsts, n, src, parts.code_bytes, stream);
    table->copy(scales_to.dsts, n, src + parts.scales_at(), parts.scale_bytes, stream);
  }
};

}  // namespace moe_rt::rows
