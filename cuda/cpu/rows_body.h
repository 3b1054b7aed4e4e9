// Bodies of the row primitives, compiled once per instruction set (rows_portable, rows_avx2, rows_avx512.cpp).
#include <algorithm>
#include <limits>

#include "rows.h"
#include "simd.h"

namespace moe_rt::rows {
namespace {

constexpr int kCacheLine = 64;

// Prefetch distance in bytes. A token's rows are in as many places as it has experts, and hardware prefetchers restart
// at each. Past a row's end is the same expert's next row, which is needed soon.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kPrefetchDistance = tuning::kPrefetchBytesAvx2;
constexpr tuning::StreamShares kStreamShares = tuning::kStreamSharesAvx2;
#else
constexpr int64_t kPrefetchDistance = tuning::kPrefetchBytes;
constexpr tuning::StreamShares kStreamShares = tuning::kStreamShares;
#endif

inline void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(p + kPrefetchDistance + i);
}

// Conversion of kCount elements to a block of accumulators, and back.
template <class B, int kCount, B (*kLoad)(const char*), void (*kStore)(char*, B)>
struct Lanes {
  using Block = B;
  static constexpr int kLanes = kCount;
  static Block load(const char* p) { return kLoad(p); }
  static void store(char* p, Block x) { kStore(p, x); }
};

// Element type: its lanes in order, and in the fastest order for sums element by element.
template <class AccType, int kSize, class Ordered, class Fastest = Ordered>
struct Element {
  using Acc = AccType;
  using InOrder = Ordered;
  using AnyOrder = Fastest;
  static constexpr int kBytes = kSize;
};

using F32 = Element<float, 4, Lanes<Floats, kFloats, load_f32, store_f32>>;
using Bf16 = Element<float, 2, Lanes<Floats, kFloats, load_bf16, store_bf16>,
                     Lanes<Deinterleaved, kDeinterleaved, load_bf16_deinterleaved, store_bf16_deinterleaved>>;
using F16 = Element<float, 2, Lanes<Floats, kFloats, load_f16, store_f16>>;
using F64 = Element<double, 8, Lanes<Doubles, kDoubles, load_f64, store_f64>>;

// Streams whole lines past the caches, and copies the bytes around them through the caches.
inline void stream_part(char* dst, const char* src, int64_t bytes) {
  const int64_t misaligned = (kCacheLine - reinterpret_cast<uintptr_t>(dst) % kCacheLine) % kCacheLine;
  int64_t i = min_of(misaligned, bytes);
  std::memcpy(dst, src, i);
  for (; i + kCacheLine <= bytes; i += kCacheLine) stream_line(dst + i, src + i);
  std::memcpy(dst + i, src + i, bytes - i);
}

// Copies whole rows through the caches: memcpy moves long rows with a single instruction, which is faster than loops if
// a peer's cache holds the lines. Streams rows past the caches in parts, each to every destination, so that each part
// is read once and no destination waits for a whole row of another.
void copy(char* const* dsts, int n, const char* src, int64_t bytes, bool stream) {
  constexpr int64_t kPart = tuning::kStreamedBytes;
  if (!stream) {
    prefetch(src, bytes);
    for (int c = 0; c < n; ++c) {
      if (dsts[c]) std::memcpy(dsts[c], src, bytes);
    }
    return;
  }
  for (int64_t i = 0; i < bytes; i += kPart) {
    const int64_t count = min_of(kPart, bytes - i);
    prefetch(src + i, count);
    for (int c = 0; c < n; ++c) {
      if (dsts[c]) stream_part(dsts[c] + i, src + i, count);
    }
  }
}

// Sums kBlocks blocks together: enough independent additions to hide their latency, and whole lines to stream. `kRows`
// is n if the compiler knows it, else 0.
template <class E, int kBlocks, int kRows>
[[gnu::always_inline]] inline void sum_blocks(char* dst, const char* const* srcs, const typename E::Acc* weights, int n,
                                              int64_t at, bool stream) {
  using L = typename E::AnyOrder;
  constexpr int kStep = L::kLanes * E::kBytes;
  typename L::Block sums[kBlocks] = {};
  for (int j = 0; j < (kRows ? kRows : n); ++j) {
    const char* src = srcs[j] + at;
    prefetch(src, kBlocks * kStep);
    for (int b = 0; b < kBlocks; ++b) sums[b] = add_scaled(sums[b], weights[j], L::load(src + b * kStep));
  }
  if (!stream) {
    for (int b = 0; b < kBlocks; ++b) L::store(dst + at + b * kStep, sums[b]);
    return;
  }
  alignas(kCacheLine) char lines[kBlocks * kStep];
  for (int b = 0; b < kBlocks; ++b) L::store(lines + b * kStep, sums[b]);
  for (int64_t i = 0; i < kBlocks * kStep; i += kCacheLine) stream_line(dst + at + i, lines + i);
}

// Sums all whole blocks of a row and returns their end. Local copies of the arguments stay in registers: the compiler
// must assume that stores to dst change the originals.
template <class E, int kRows>
int64_t sum_whole_blocks(char* dst, const char* const* given_srcs, const typename E::Acc* given_weights, int n,
                         int64_t bytes, bool stream) {
  constexpr int64_t kStep = E::AnyOrder::kLanes * E::kBytes, kMany = tuning::kBlocksTogether;
  const char* srcs[kMaxTopk];
  typename E::Acc weights[kMaxTopk];
  for (int j = 0; j < (kRows ? kRows : n); ++j) srcs[j] = given_srcs[j], weights[j] = given_weights[j];
  int64_t at = 0;
  for (; at + kMany * kStep <= bytes; at += kMany * kStep) {
    sum_blocks<E, kMany, kRows>(dst, srcs, weights, n, at, stream);
  }
  for (; at + kStep <= bytes; at += kStep) sum_blocks<E, 1, kRows>(dst, srcs, weights, n, at, false);
  return at;
}

template <class L>
inline typename L::Block load_tail(const char* p, int64_t bytes) {
  char padded[sizeof(typename L::Block)] = {};
  std::memcpy(padded, p, bytes);
  return L::load(padded);
}

template <class L>
inline void store_tail(char* p, typename L::Block x, int64_t bytes) {
  char padded[sizeof(x)];
  L::store(padded, x);
  std::memcpy(p, padded, bytes);
}

template <class E>
void weighted_sum(char* dst, const char* const* srcs, const typename E::Acc* given, int n, int64_t hidden,
                  bool stream) {
  using L = typename E::AnyOrder;
  typename E::Acc weights[kMaxTopk];
  for (int j = 0; j < n; ++j) {  // store_bf16_deinterleaved requires the quiet NaN
    weights[j] = given[j] == given[j] ? given[j] : std::numeric_limits<typename E::Acc>::quiet_NaN();
  }
  stream = stream && reinterpret_cast<uintptr_t>(dst) % kCacheLine == 0;
  const auto sum_whole = n == 1   ? sum_whole_blocks<E, 1>
                         : n == 2 ? sum_whole_blocks<E, 2>
                         : n == 3 ? sum_whole_blocks<E, 3>
                         : n == 4 ? sum_whole_blocks<E, 4>
                                  : sum_whole_blocks<E, 0>;
  const int64_t at = sum_whole(dst, srcs, weights, n, hidden * E::kBytes, stream), rest = hidden * E::kBytes - at;
  if (rest == 0) return;
  typename L::Block sum = {};
  for (int j = 0; j < n; ++j) sum = add_scaled(sum, weights[j], load_tail<L>(srcs[j] + at, rest));
  store_tail<L>(dst + at, sum, rest);
}

template <class E>
typename E::Acc scale_dot(char* dst, typename E::Acc weight, const char* g, const char* y, int64_t hidden,
                          bool stream) {
  using L = typename E::InOrder;
  constexpr int64_t kStep = L::kLanes * E::kBytes, kWhole = std::max<int64_t>(kStep, kCacheLine);
  stream = stream && reinterpret_cast<uintptr_t>(dst) % kCacheLine == 0;
  const int64_t whole = hidden / L::kLanes * kStep, rest = hidden * E::kBytes - whole;
  typename L::Block dot = {};
  const auto scale_block = [&](char* to, int64_t at) {
    const typename L::Block grad = L::load(g + at);
    dot = add_product(dot, grad, L::load(y + at));
    L::store(to, scale(weight, grad));
  };
  int64_t at = 0;
  for (; at + kWhole <= whole; at += kWhole) {
    prefetch(g + at, kWhole);
    prefetch(y + at, kWhole);
    alignas(kCacheLine) char lines[kWhole];
    for (int64_t i = 0; i < kWhole; i += kStep) scale_block((stream ? lines : dst + at) + i, at + i);
    for (int64_t i = 0; stream && i < kWhole; i += kCacheLine) stream_line(dst + at + i, lines + i);
  }
  for (; at < whole; at += kStep) scale_block(dst + at, at);
  if (rest != 0) {
    const typename L::Block grad = load_tail<L>(g + at, rest);
    dot = add_product(dot, grad, load_tail<L>(y + at, rest));
    store_tail<L>(dst + at, scale(weight, grad), rest);
  }
  typename E::Acc lanes[L::kLanes], sum = 0;
  std::memcpy(lanes, &dot, sizeof(lanes));
  for (const typename E::Acc lane : lanes) sum += lane;
  return sum;
}

// Encodes a row block by block. Integers have no rounding, so every instruction set gives the same bits here as well.
template <class E>
void encode_sum(Codec codec, char* dst, const char* const* srcs, const float* weights, int n, int64_t hidden) {
  using L = typename E::InOrder;
  auto* codes = reinterpret_cast<uint8_t*>(dst);
  auto* scales = reinterpret_cast<float*>(dst + codec_parts(hidden).scales_at());
  alignas(kCacheLine) float sums[kCodecBlock];
  char* const block = reinterpret_cast<char*>(sums);
  for (int64_t first = 0; first < hidden; first += kCodecBlock) {
    const int64_t count = min_of<int64_t>(kCodecBlock, hidden - first);
    for (int64_t i = 0; i < count; i += L::kLanes) {
      const int64_t bytes = min_of<int64_t>(L::kLanes, count - i) * E::kBytes;
      typename L::Block sum = {};
      for (int j = 0; j < n; ++j) {
        sum = add_scaled(sum, weights[j], load_tail<L>(srcs[j] + (first + i) * E::kBytes, bytes));
      }
      F32::InOrder::store(block + i * 4, sum);
    }
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(sums[i]));
    const CodecScale s = codec_scale(codec, largest);
    for (int64_t i = 0; i < count; ++i) codes[first + i] = encode(codec, sums[i], s.inverse);
    scales[first / kCodecBlock] = s.scale;
  }
}

template <class E>
void decode_sum(Codec codec, char* dst, const char* const* srcs, const float* weights, int n, int64_t hidden) {
  using L = typename E::InOrder;
  alignas(kCacheLine) float sums[kCodecBlock];
  for (int64_t first = 0; first < hidden; first += kCodecBlock) {
    const int64_t count = min_of<int64_t>(kCodecBlock, hidden - first);
    std::fill(sums, sums + kCodecBlock, 0.0f);
    for (int j = 0; j < n; ++j) {
      const auto* codes = reinterpret_cast<const uint8_t*>(srcs[j]) + first;
      const float scale =
          reinterpret_cast<const float*>(srcs[j] + codec_parts(hidden).scales_at())[first / kCodecBlock];
      const float weight = weights[j];
      for (int64_t i = 0; i < count; ++i) sums[i] += weight * decode(codec, codes[i], scale);
    }
    for (int64_t i = 0; i < count; i += L::kLanes) {
      const auto sum = F32::InOrder::load(reinterpret_cast<const char*>(sums + i));
      store_tail<L>(dst + (first + i) * E::kBytes, sum, min_of<int64_t>(L::kLanes, count - i) * E::kBytes);
    }
  }
}

template <class Acc, class E>
constexpr Functions<Acc> functions() {
  if constexpr (!std::is_same_v<Acc, typename E::Acc>) {
    return {};
  } else if constexpr (E::kBytes == 8) {
    return {weighted_sum<E>, scale_dot<E>, nullptr, nullptr};
  } else {
    return {weighted_sum<E>, scale_dot<E>, encode_sum<E>, decode_sum<E>};
  }
}

// The element types in the order of Elem.
template <class... Es>
constexpr Table table_of(const char* name) {
  static_assert(sizeof...(Es) == kNumElems, "one for each Elem");
  return {name, kStreamShares, kPrefetchDistance, copy, {functions<float, Es>()...}, {functions<double, Es>()...}};
}

constexpr Table make_table(const char* name) { return table_of<F32, Bf16, F16, F64>(name); }

}  // namespace
}  // namespace moe_rt::rows
