// The bodies of the row primitives, compiled once per instruction set (rows_portable, rows_avx2, rows_avx512.cpp).
//
// Written with 64-byte vectors of the compiler, which it lowers to whatever the instruction set has; only
// half-precision conversion and streaming stores need intrinsics. Everything has internal linkage: the same template
// compiled with wider instructions must not replace the portable one at link time.
#include <cstring>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_rt::rows {
namespace {

constexpr int kVector = 64;
typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef char Bytes __attribute__((vector_size(64)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// `p` is aligned to the vector when streaming.
template <class V>
inline void store(void* p, const V& v, bool stream) {
#if defined(__x86_64__)
  if (stream) {
    constexpr int kStep = 16;
    static_assert(sizeof(V) % kStep == 0);
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), load<__m512i>(&v));
#endif
#if defined(__AVX__)
    for (size_t i = 0; i < sizeof(V); i += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(p) + i),
                          load<__m256i>(reinterpret_cast<const char*>(&v) + i));
    }
#else
    for (size_t i = 0; i < sizeof(V); i += kStep) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(p) + i),
                       load<__m128i>(reinterpret_cast<const char*>(&v) + i));
    }
#endif
    return;
  }
#else
  (void)stream;
#endif
  std::memcpy(p, &v, sizeof(v));
}

// Element types: how a vector of them becomes accumulators and back. kLanes accumulators at a time.
struct F32 {
  using Acc = float;
  using Vec = Floats;
  static constexpr int kLanes = 16, kBytes = 4;
  static Vec load_acc(const char* p) { return load<Floats>(p); }
  static void store_acc(char* p, Vec v, bool stream) { store(p, v, stream); }
};

struct F64 {
  using Acc = double;
  using Vec = Doubles;
  static constexpr int kLanes = 8, kBytes = 8;
  static Vec load_acc(const char* p) { return load<Doubles>(p); }
  static void store_acc(char* p, Vec v, bool stream) { store(p, v, stream); }
};

struct Bf16 {
  using Acc = float;
  using Vec = Floats;
  static constexpr int kLanes = 16, kBytes = 2;
  static Vec load_acc(const char* p) { return (Floats)(__builtin_convertvector(load<Halves>(p), Words) << 16); }
  static void store_acc(char* p, Vec v, bool stream) {
    const Words u = (Words)v;
    const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const Words quiet_nan = (u >> 16) | 0x40u;
    const Words result = v == v ? rounded : quiet_nan;
    store(p, __builtin_convertvector(result, Halves), stream);
  }
};

struct F16 {
  using Acc = float;
  using Vec = Floats;
  static constexpr int kLanes = 16, kBytes = 2;
#if defined(__F16C__)
  static Vec load_acc(const char* p) {
    Floats v;
    for (int i = 0; i < 2; ++i) {
      const __m256 part = _mm256_cvtph_ps(load<__m128i>(p + 16 * i));
      std::memcpy(reinterpret_cast<char*>(&v) + 32 * i, &part, 32);
    }
    return v;
  }
  static void store_acc(char* p, Vec v, bool stream) {
    Halves h;
    for (int i = 0; i < 2; ++i) {
      const __m256 part = load<__m256>(reinterpret_cast<const char*>(&v) + 32 * i);
      const __m128i bits = _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      std::memcpy(reinterpret_cast<char*>(&h) + 16 * i, &bits, 16);
    }
    store(p, h, stream);
  }
#else
  static Vec load_acc(const char* p) {
    const Words h = __builtin_convertvector(load<Halves>(p), Words);
    const Words sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises denormals; exact for every finite value.
    const Floats finite = (Floats)(magnitude << 13) * 0x1p112f;
    const Words infinite = 0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00u ? Words{} + 0x400000u : Words{});
    return (Floats)(sign | (magnitude >= 0x7c00u ? infinite : (Words)finite));
  }
  static void store_acc(char* p, Vec v, bool stream) {
    const Words u = (Words)v, sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    const Words normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    // Adding 0.5 lets the adder round a denormal result at its last kept bit, 2^-24.
    const Words denormal = (Words)((Floats)a + 0.5f) - 0x3f000000u;
    Words h = a < 0x38800000u ? denormal : normal;
    h = a >= 0x477ff000u ? Words{} + 0x7c00u : h;
    h = a > 0x7f800000u ? (0x7e00u | ((a >> 13) & 0x3ffu)) : h;
    store(p, __builtin_convertvector(sign | h, Halves), stream);
  }
#endif
};

void copy(char* dst, const char* src, int64_t bytes, bool stream) {
  if (!stream) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const int64_t misaligned = (kVector - reinterpret_cast<uintptr_t>(dst) % kVector) % kVector;
  const int64_t head = misaligned < bytes ? misaligned : bytes;
  std::memcpy(dst, src, head);
  int64_t i = head;
  for (; i + 4 * kVector <= bytes; i += 4 * kVector) {
    const Bytes a = load<Bytes>(src + i), b = load<Bytes>(src + i + 64), c = load<Bytes>(src + i + 128),
                d = load<Bytes>(src + i + 192);
    store(dst + i, a, true), store(dst + i + 64, b, true), store(dst + i + 128, c, true), store(dst + i + 192, d, true);
  }
  for (; i + kVector <= bytes; i += kVector) store(dst + i, load<Bytes>(src + i), true);
  std::memcpy(dst + i, src + i, bytes - i);
}

template <class E>
inline typename E::Vec load_tail(const char* p, int64_t lanes) {
  char padded[E::kLanes * E::kBytes] = {};
  std::memcpy(padded, p, lanes * E::kBytes);
  return E::load_acc(padded);
}

template <class E>
inline void store_tail(char* p, typename E::Vec v, int64_t lanes) {
  char padded[E::kLanes * E::kBytes];
  E::store_acc(padded, v, false);
  std::memcpy(p, padded, lanes * E::kBytes);
}

template <class E>
inline bool can_stream(const char* dst) {
  return reinterpret_cast<uintptr_t>(dst) % (E::kLanes * E::kBytes) == 0;
}

// Two vectors a step keep two independent chains of additions in flight.
template <class E>
void weighted_sum(char* dst, const char* const* srcs, const typename E::Acc* weights, int n, int64_t hidden,
                  bool stream) {
  constexpr int64_t kStep = E::kLanes * E::kBytes;
  stream = stream && can_stream<E>(dst);
  const int64_t whole = hidden / E::kLanes * E::kLanes * E::kBytes;
  int64_t i = 0;
  for (; i + 2 * kStep <= whole; i += 2 * kStep) {
    typename E::Vec a{}, b{};
    for (int j = 0; j < n; ++j) {
      a += weights[j] * E::load_acc(srcs[j] + i);
      b += weights[j] * E::load_acc(srcs[j] + i + kStep);
    }
    E::store_acc(dst + i, a, stream);
    E::store_acc(dst + i + kStep, b, stream);
  }
  for (; i < whole; i += kStep) {
    typename E::Vec a{};
    for (int j = 0; j < n; ++j) a += weights[j] * E::load_acc(srcs[j] + i);
    E::store_acc(dst + i, a, stream);
  }
  const int64_t rest = hidden % E::kLanes;
  if (rest == 0) return;
  typename E::Vec a{};
  for (int j = 0; j < n; ++j) a += weights[j] * load_tail<E>(srcs[j] + i, rest);
  store_tail<E>(dst + i, a, rest);
}

template <class E>
typename E::Acc scale_dot(char* dst, typename E::Acc weight, const char* g, const char* y, int64_t hidden,
                          bool stream) {
  constexpr int64_t kStep = E::kLanes * E::kBytes;
  stream = stream && can_stream<E>(dst);
  const int64_t whole = hidden / E::kLanes * kStep;
  typename E::Vec dot{};
  int64_t i = 0;
  for (; i < whole; i += kStep) {
    const typename E::Vec grad = E::load_acc(g + i);
    dot += grad * E::load_acc(y + i);
    E::store_acc(dst + i, weight * grad, stream);
  }
  if (const int64_t rest = hidden % E::kLanes; rest != 0) {
    const typename E::Vec grad = load_tail<E>(g + i, rest);
    dot += grad * load_tail<E>(y + i, rest);
    store_tail<E>(dst + i, weight * grad, rest);
  }
  typename E::Acc sum = 0;
  for (int lane = 0; lane < E::kLanes; ++lane) sum += dot[lane];
  return sum;
}

template <class E>
constexpr Functions<typename E::Acc> functions() {
  return {weighted_sum<E>, scale_dot<E>};
}

constexpr Table make_table(const char* name) {
  return {name, copy, functions<F32>(), functions<Bf16>(), functions<F16>(), functions<F64>()};
}

}  // namespace
}  // namespace moe_rt::rows
