// The bodies of the row primitives, compiled once per instruction set (rows_portable, rows_avx2, rows_avx512.cpp).
#include <algorithm>
#include <limits>

#include "rows.h"
#include "simd.h"

namespace moe_rt::rows {
namespace {

constexpr int kLine = 64;

// How far ahead of a load its line is asked for. Rows of a token lie in as many places as it has experts, and hardware
// prefetchers start anew at each; past the end of a row comes the same expert's next row, which is wanted soon.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kAhead = 1024;
#else
constexpr int kAhead = 2048;
#endif

inline void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + kAhead + i);
}

// Element types: how a block of them becomes accumulators and back, its lanes in order or in the machine's own.
struct F32 {
  using Acc = float;
  using Block = Floats;
  static constexpr int kLanes = kFloats, kBytes = 4;
  static Block load(const char* p) { return load_f32(p); }
  static void store(char* p, Block x) { store_f32(p, x); }
  static Block load_apart(const char* p) { return load_f32(p); }
  static void store_apart(char* p, Block x) { store_f32(p, x); }
  static Block none() { return zero(); }
};

struct Bf16 {
  using Acc = float;
  using Block = Floats;
  static constexpr int kLanes = kFloats, kBytes = 2;
  static Block load(const char* p) { return load_bf16(p); }
  static void store(char* p, Block x) { store_bf16(p, x); }
  static Block load_apart(const char* p) { return load_bf16_apart(p); }
  static void store_apart(char* p, Block x) { store_bf16_apart(p, x); }
  static Block none() { return zero(); }
};

struct F16 {
  using Acc = float;
  using Block = Floats;
  static constexpr int kLanes = kFloats, kBytes = 2;
  static Block load(const char* p) { return load_f16(p); }
  static void store(char* p, Block x) { store_f16(p, x); }
  static Block load_apart(const char* p) { return load_f16(p); }
  static void store_apart(char* p, Block x) { store_f16(p, x); }
  static Block none() { return zero(); }
};

struct F64 {
  using Acc = double;
  using Block = Doubles;
  static constexpr int kLanes = kDoubles, kBytes = 8;
  static Block load(const char* p) { return load_f64(p); }
  static void store(char* p, Block x) { store_f64(p, x); }
  static Block load_apart(const char* p) { return load_f64(p); }
  static void store_apart(char* p, Block x) { store_f64(p, x); }
  static Block none() { return {}; }
};

// Whole lines past the caches, what surrounds them through them.
inline void stream_part(char* dst, const char* src, int64_t bytes) {
  const int64_t misaligned = (kLine - reinterpret_cast<uintptr_t>(dst) % kLine) % kLine;
  int64_t i = smaller(misaligned, bytes);
  std::memcpy(dst, src, i);
  for (; i + kLine <= bytes; i += kLine) stream_line(dst + i, src + i);
  std::memcpy(dst + i, src + i, bytes - i);
}

// Streamed part by part to every place, so that each part is read once and no place waits for a whole row of another.
void copy(char* const* dsts, int n, const char* src, int64_t bytes, bool stream) {
  constexpr int64_t kPart = 16 * kLine;
  const int64_t part = stream ? kPart : bytes;
  for (int64_t i = 0; i < bytes; i += part) {
    const int64_t count = smaller(part, bytes - i);
    if (stream) prefetch(src + i, count);
    for (int c = 0; c < n; ++c) {
      if (!dsts[c]) continue;
      if (stream) {
        stream_part(dsts[c] + i, src + i, count);
      } else {
        std::memcpy(dsts[c], src, bytes);
      }
    }
  }
}

// kBlocks blocks together: enough independent additions to hide their latency, and whole lines to stream. `kRows` is n
// where the compiler knows it.
template <class E, int kBlocks, int kRows>
[[gnu::always_inline]] inline void sum_blocks(char* dst, const char* const* srcs, const typename E::Acc* weights, int n,
                                              int64_t at, bool stream) {
  constexpr int kStep = E::kLanes * E::kBytes;
  typename E::Block sums[kBlocks];
  for (auto& s : sums) s = E::none();
  for (int j = 0; j < (kRows ? kRows : n); ++j) {
    const char* src = srcs[j] + at;
    prefetch(src, kBlocks * kStep);
    for (int b = 0; b < kBlocks; ++b) sums[b] = add_scaled(sums[b], weights[j], E::load_apart(src + b * kStep));
  }
  if (!stream) {
    for (int b = 0; b < kBlocks; ++b) E::store_apart(dst + at + b * kStep, sums[b]);
    return;
  }
  alignas(kLine) char lines[kBlocks * kStep];
  for (int b = 0; b < kBlocks; ++b) E::store_apart(lines + b * kStep, sums[b]);
  for (int64_t i = 0; i < kBlocks * kStep; i += kLine) stream_line(dst + at + i, lines + i);
}

// All whole blocks of a row; returns where they end. Copies of what it is given stay in registers: stores to dst might
// change the originals, for all that the compiler knows.
template <class E, int kRows>
int64_t sum_whole_blocks(char* dst, const char* const* given_srcs, const typename E::Acc* given_weights, int n,
                         int64_t whole, bool stream) {
  constexpr int64_t kStep = E::kLanes * E::kBytes, kMany = 4;
  const char* srcs[kMaxTopk];
  typename E::Acc weights[kMaxTopk];
  for (int j = 0; j < (kRows ? kRows : n); ++j) srcs[j] = given_srcs[j], weights[j] = given_weights[j];
  int64_t at = 0;
  for (; at + kMany * kStep <= whole; at += kMany * kStep) {
    sum_blocks<E, kMany, kRows>(dst, srcs, weights, n, at, stream);
  }
  for (; at < whole; at += kStep) sum_blocks<E, 1, kRows>(dst, srcs, weights, n, at, false);
  return at;
}

template <class E>
inline typename E::Block load_tail(const char* p, int64_t lanes) {
  char padded[E::kLanes * E::kBytes] = {};
  std::memcpy(padded, p, lanes * E::kBytes);
  return E::load(padded);
}

template <class E>
inline void store_tail(char* p, typename E::Block x, int64_t lanes) {
  char padded[E::kLanes * E::kBytes];
  E::store(padded, x);
  std::memcpy(p, padded, lanes * E::kBytes);
}

template <class E>
void weighted_sum(char* dst, const char* const* srcs, const typename E::Acc* given, int n, int64_t hidden,
                  bool stream) {
  typename E::Acc weights[kMaxTopk];
  for (int j = 0; j < n; ++j) {  // a NaN becomes the one that store_apart may be given
    weights[j] = given[j] == given[j] ? given[j] : std::numeric_limits<typename E::Acc>::quiet_NaN();
  }
  stream = stream && reinterpret_cast<uintptr_t>(dst) % kLine == 0;
  const int64_t whole = hidden / E::kLanes * E::kLanes * E::kBytes, rest = hidden % E::kLanes;
  const auto sum_whole = n == 1   ? sum_whole_blocks<E, 1>
                         : n == 2 ? sum_whole_blocks<E, 2>
                         : n == 3 ? sum_whole_blocks<E, 3>
                         : n == 4 ? sum_whole_blocks<E, 4>
                                  : sum_whole_blocks<E, 0>;
  const int64_t at = sum_whole(dst, srcs, weights, n, whole, stream);
  if (rest == 0) return;
  typename E::Block sum = E::none();
  for (int j = 0; j < n; ++j) sum = add_scaled(sum, weights[j], load_tail<E>(srcs[j] + at, rest));
  store_tail<E>(dst + at, sum, rest);
}

template <class E>
typename E::Acc scale_dot(char* dst, typename E::Acc weight, const char* g, const char* y, int64_t hidden,
                          bool stream) {
  constexpr int64_t kStep = E::kLanes * E::kBytes, kWhole = std::max<int64_t>(kStep, kLine);
  stream = stream && reinterpret_cast<uintptr_t>(dst) % kLine == 0;
  const int64_t whole = hidden / E::kLanes * kStep, rest = hidden % E::kLanes;
  typename E::Block dot = E::none();
  const auto scale_block = [&](char* to, int64_t at) {
    const typename E::Block grad = E::load(g + at);
    dot = add_product(dot, grad, E::load(y + at));
    E::store(to, scale(weight, grad));
  };
  int64_t at = 0;
  for (; at + kWhole <= whole; at += kWhole) {
    prefetch(g + at, kWhole);
    prefetch(y + at, kWhole);
    alignas(kLine) char lines[kWhole];
    for (int64_t i = 0; i < kWhole; i += kStep) scale_block((stream ? lines : dst + at) + i, at + i);
    for (int64_t i = 0; stream && i < kWhole; i += kLine) stream_line(dst + at + i, lines + i);
  }
  for (; at < whole; at += kStep) scale_block(dst + at, at);
  if (rest != 0) {
    const typename E::Block grad = load_tail<E>(g + at, rest);
    dot = add_product(dot, grad, load_tail<E>(y + at, rest));
    store_tail<E>(dst + at, scale(weight, grad), rest);
  }
  typename E::Acc lanes[E::kLanes], sum = 0;
  std::memcpy(lanes, &dot, sizeof(lanes));
  for (const typename E::Acc lane : lanes) sum += lane;
  return sum;
}

// A coded row is coded block by block: integers have no rounding, so every instruction set gives the same bits here
// too.
template <class E>
void encode_sum(Wire wire, char* dst, const char* const* srcs, const float* weights, int n, int64_t hidden) {
  auto* codes = reinterpret_cast<uint8_t*>(dst);
  auto* scales = reinterpret_cast<float*>(dst + wire_scales_offset(hidden));
  alignas(kLine) float sums[kWireBlock];
  char* const block = reinterpret_cast<char*>(sums);
  for (int64_t first = 0; first < hidden; first += kWireBlock) {
    const int64_t count = smaller<int64_t>(kWireBlock, hidden - first);
    for (int64_t i = 0; i < count; i += E::kLanes) {
      const int64_t lanes = smaller<int64_t>(E::kLanes, count - i);
      typename E::Block sum = E::none();
      for (int j = 0; j < n; ++j) {
        sum = add_scaled(sum, weights[j], load_tail<E>(srcs[j] + (first + i) * E::kBytes, lanes));
      }
      F32::store(block + i * 4, sum);
    }
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(sums[i]));
    const WireScale s = wire_scale(wire, largest);
    for (int64_t i = 0; i < count; ++i) codes[first + i] = encode(wire, sums[i], s.inverse);
    scales[first / kWireBlock] = s.scale;
  }
}

template <class E>
void decode_sum(Wire wire, char* dst, const char* const* srcs, int n, int64_t hidden) {
  alignas(kLine) float sums[kWireBlock];
  for (int64_t first = 0; first < hidden; first += kWireBlock) {
    const int64_t count = smaller<int64_t>(kWireBlock, hidden - first);
    std::fill(sums, sums + kWireBlock, 0.0f);
    for (int j = 0; j < n; ++j) {
      const auto* codes = reinterpret_cast<const uint8_t*>(srcs[j]) + first;
      const float scale = reinterpret_cast<const float*>(srcs[j] + wire_scales_offset(hidden))[first / kWireBlock];
      for (int64_t i = 0; i < count; ++i) sums[i] += decode(wire, codes[i], scale);
    }
    for (int64_t i = 0; i < count; i += E::kLanes) {
      const auto sum = F32::load(reinterpret_cast<const char*>(sums + i));
      store_tail<E>(dst + (first + i) * E::kBytes, sum, smaller<int64_t>(E::kLanes, count - i));
    }
  }
}

template <class E>
constexpr Functions<typename E::Acc> functions() {
  if constexpr (E::kBytes == 8) {
    return {weighted_sum<E>, scale_dot<E>, nullptr, nullptr};
  } else {
    return {weighted_sum<E>, scale_dot<E>, encode_sum<E>, decode_sum<E>};
  }
}

constexpr Table make_table(const char* name, StreamShares stream) {
  return {name, stream, copy, functions<F32>(), functions<Bf16>(), functions<F16>(), functions<F64>()};
}

}  // namespace
}  // namespace moe_rt::rows
