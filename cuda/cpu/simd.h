// Blocks of sixteen floats or eight doubles, for the instruction set that the including file is compiled for.
//
// A block always has the same lanes, in whatever registers, so that sums over lanes have one order. Sums element by
// element need no order: bf16 has separate blocks for them, Deinterleaved, whose lanes are shuffled until they are
// stored. A stored value must not be a NaN with bits in its lower half: sums of bf16 rows have none, if no weight has.
// Everything has internal linkage: code compiled with wider instructions must not replace the portable one at link
// time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_rt::rows {
namespace {

constexpr int kFloats = 16, kDoubles = 8;

#if defined(__AVX512F__)

struct Floats {
  __m512 v;
};
inline Floats load_f32(const char* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load_bf16(const char* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Floats load_f16(const char* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats add_scaled(Floats sum, float w, Floats x) {
  return {_mm512_add_ps(sum.v, _mm512_mul_ps(_mm512_set1_ps(w), x.v))};
}
inline Floats add_product(Floats sum, Floats x, Floats y) { return {_mm512_add_ps(sum.v, _mm512_mul_ps(x.v, y.v))}; }
inline Floats scale(float w, Floats x) { return {_mm512_mul_ps(_mm512_set1_ps(w), x.v)}; }
inline void store_f32(char* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline void store_bf16(char* p, Floats x) {
  const __m512i bits = _mm512_castps_si512(x.v), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i even = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m256i packed = _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, even, quiet));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
// Even and odd elements: each is a shift or a mask away from its float, which costs half as much as widening.
struct Deinterleaved {
  __m512 even, odd;
};
constexpr int kDeinterleaved = 32;
inline Deinterleaved load_bf16_deinterleaved(const char* p) {
  const __m512i pairs = _mm512_loadu_si512(p), odd = _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(odd)};
}
inline Deinterleaved add_scaled(Deinterleaved sum, float w, Deinterleaved x) {
  const __m512 f = _mm512_set1_ps(w);
  return {_mm512_add_ps(sum.even, _mm512_mul_ps(f, x.even)), _mm512_add_ps(sum.odd, _mm512_mul_ps(f, x.odd))};
}
// Rounds to the nearest even bf16, in the upper half of each lane; a NaN must not carry out of its lane.
inline __m512i round_number(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
inline void store_bf16_deinterleaved(char* p, Deinterleaved x) {
  const __m512i even = _mm512_srli_epi32(round_number(x.even), 16);
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, even, round_number(x.odd)));
}
inline void store_f16(char* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__)

struct Floats {
  __m256 lo, hi;
};
inline Floats load_f32(const char* p) {
  const float* f = reinterpret_cast<const float*>(p);
  return {_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)};
}
inline __m128i load_128(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256 widen_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline Floats load_bf16(const char* p) { return {widen_bf16(load_128(p)), widen_bf16(load_128(p + 16))}; }
inline Floats load_f16(const char* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 16))}; }
inline Floats add_scaled(Floats sum, float w, Floats x) {
  const __m256 f = _mm256_set1_ps(w);
  return {_mm256_add_ps(sum.lo, _mm256_mul_ps(f, x.lo)), _mm256_add_ps(sum.hi, _mm256_mul_ps(f, x.hi))};
}
inline Floats add_product(Floats sum, Floats x, Floats y) {
  return {_mm256_add_ps(sum.lo, _mm256_mul_ps(x.lo, y.lo)), _mm256_add_ps(sum.hi, _mm256_mul_ps(x.hi, y.hi))};
}
inline Floats scale(float w, Floats x) {
  const __m256 f = _mm256_set1_ps(w);
  return {_mm256_mul_ps(f, x.lo), _mm256_mul_ps(f, x.hi)};
}
inline void store_f32(char* p, Floats x) {
  _mm256_storeu_ps(reinterpret_cast<float*>(p), x.lo);
  _mm256_storeu_ps(reinterpret_cast<float*>(p) + 8, x.hi);
}
// Rounds to the nearest even bf16, in the upper half of each lane; a NaN must not carry out of its lane.
inline __m256i round_number(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
inline __m256i round_bf16(__m256 x) {
  const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(round_number(x), quiet, nan), 16);
}
inline void store_bf16(char* p, Floats x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
// Even elements in `lo`, odd ones in `hi`: each is a shift or a mask away from its float, half the work of widening.
using Deinterleaved = Floats;
constexpr int kDeinterleaved = kFloats;
inline Deinterleaved load_bf16_deinterleaved(const char* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(odd)};
}
inline void store_bf16_deinterleaved(char* p, Deinterleaved x) {
  const __m256i even = _mm256_srli_epi32(round_number(x.lo), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi16(even, round_number(x.hi), 0xaa));
}
inline void store_f16(char* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + 1, _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}

#else  // plain loops, which the compiler vectorises with whatever the baseline has

struct Floats {
  float v[kFloats];
};
inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline uint16_t half_at(const char* p, int i) {
  uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  return h;
}
inline void put_half(char* p, int i, uint32_t u) {
  const uint16_t h = static_cast<uint16_t>(u);
  std::memcpy(p + 2 * i, &h, 2);
}
inline Floats load_f32(const char* p) {
  Floats x;
  std::memcpy(x.v, p, sizeof(x.v));
  return x;
}
inline Floats load_bf16(const char* p) {
  Floats x;
  for (int i = 0; i < kFloats; ++i) x.v[i] = float_of(uint32_t{half_at(p, i)} << 16);
  return x;
}
inline Floats load_f16(const char* p) {
  Floats x;
  for (int i = 0; i < kFloats; ++i) {
    const uint32_t h = half_at(p, i), sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises denormals; exact for every finite value.
    const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    const uint32_t special = 0x7f800000u | magnitude << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
    x.v[i] = float_of(sign | (magnitude >= 0x7c00u ? special : finite));
  }
  return x;
}
inline Floats add_scaled(Floats sum, float w, Floats x) {
  for (int i = 0; i < kFloats; ++i) sum.v[i] += w * x.v[i];
  return sum;
}
inline Floats add_product(Floats sum, Floats x, Floats y) {
  for (int i = 0; i < kFloats; ++i) sum.v[i] += x.v[i] * y.v[i];
  return sum;
}
inline Floats scale(float w, Floats x) {
  for (int i = 0; i < kFloats; ++i) x.v[i] *= w;
  return x;
}
inline void store_f32(char* p, Floats x) { std::memcpy(p, x.v, sizeof(x.v)); }
inline void store_bf16(char* p, Floats x) {
  for (int i = 0; i < kFloats; ++i) {
    const uint32_t u = bits_of(x.v[i]), even = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    put_half(p, i, x.v[i] == x.v[i] ? even : u >> 16 | 0x40u);
  }
}
using Deinterleaved = Floats;
constexpr int kDeinterleaved = kFloats;
inline Deinterleaved load_bf16_deinterleaved(const char* p) { return load_bf16(p); }
inline void store_bf16_deinterleaved(char* p, Deinterleaved x) { store_bf16(p, x); }
inline void store_f16(char* p, Floats x) {
  for (int i = 0; i < kFloats; ++i) {
    const uint32_t u = bits_of(x.v[i]), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    const uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
    // Adding 0.5 lets the adder round a denormal result at its last kept bit, 2^-24.
    const uint32_t denormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
    const uint32_t finite = a < 0x38800000u ? denormal : a >= 0x477ff000u ? 0x7c00u : normal;
    put_half(p, i, sign | (a > 0x7f800000u ? 0x7e00u | (a >> 13 & 0x3ffu) : finite));
  }
}

#endif

struct Doubles {
  double v[kDoubles];
};
inline Doubles load_f64(const char* p) {
  Doubles x;
  std::memcpy(x.v, p, sizeof(x.v));
  return x;
}
inline Doubles add_scaled(Doubles sum, double w, Doubles x) {
  for (int i = 0; i < kDoubles; ++i) sum.v[i] += w * x.v[i];
  return sum;
}
inline Doubles add_product(Doubles sum, Doubles x, Doubles y) {
  for (int i = 0; i < kDoubles; ++i) sum.v[i] += x.v[i] * y.v[i];
  return sum;
}
inline Doubles scale(double w, Doubles x) {
  for (int i = 0; i < kDoubles; ++i) x.v[i] *= w;
  return x;
}
inline void store_f64(char* p, Doubles x) { std::memcpy(p, x.v, sizeof(x.v)); }

// Writes a 64-byte line past the caches; `p` is aligned to 64.
inline void stream_line(char* p, const char* line) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_loadu_si512(line));
#elif defined(__AVX2__)
  for (int i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + i)));
  }
#elif defined(__x86_64__)
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + i)));
  }
#else
  std::memcpy(p, line, 64);
#endif
}

}  // namespace
}  // namespace moe_rt::rows
