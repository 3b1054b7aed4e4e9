// Codecs for rows in transit: one-byte codes with an fp32 scale for every 128. A row is encoded once, when dispatch
// publishes it or combine pushes its partial, and decoded by the rank that reads it.
//
// Current scaling: a block's largest magnitude becomes the largest code. fp8 is e4m3 without infinities (OCP 8-bit
// floating point, 2023), rounded to nearest even; int8 is symmetric in [-127, 127]. A NaN or infinity in a block makes
// the whole block NaN, so that no non-finite value is lost.
#pragma once

#include "platform.h"

namespace moe_rt {

// Encoding of rows in transit: raw, fp8 or int8. Values are those of moe_rt/config/codec.py.
enum class Codec : int32_t { kRaw = 0, kFp8 = 1, kInt8 = 2 };

inline constexpr int kCodecBlock = 128;

// A token's row in a window, if it has scales: codes first, then, at the next multiple of 16 bytes, the scales. Both
// come from a codec of this file or from the caller; for the caller's, only the byte counts are known here.
struct RowParts {
  int64_t code_bytes, scale_bytes;
  MOE_RT_FN constexpr int64_t scales_at() const { return round_up(code_bytes, 16); }
  MOE_RT_FN constexpr int64_t bytes() const { return scales_at() + scale_bytes; }
};

MOE_RT_FN constexpr RowParts codec_parts(int64_t hidden) {
  return {hidden, 4 * ((hidden + kCodecBlock - 1) / kCodecBlock)};
}
MOE_RT_FN constexpr int64_t codec_row_bytes(Codec codec, int64_t hidden, int64_t elem_bytes) {
  return codec == Codec::kRaw ? hidden * elem_bytes : codec_parts(hidden).bytes();
}

MOE_RT_FN uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}
MOE_RT_FN float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22.
MOE_RT_FN float round_even(float x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: an fp32 of that size has no bits for fractions
  return (x + shift) - shift;
}

// Requires |x| <= 448, up to rounding. Both zeros encode to +0: a sum of rows starts at +0 and would lose a negative
// zero.
MOE_RT_FN uint8_t encode_fp8(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;  // three bits of fraction are kept
  normal = normal - (120u << 3);                                           // exponents biased by 7 instead of 127
  normal = normal > 0x7eu ? 0x7eu : normal;
  const uint32_t subnormal = uint32_t(round_even(bits_float(magnitude) * 512.0f));  // units of 2^-9
  const uint32_t code = magnitude < (121u << 23) ? subnormal : normal;
  return uint8_t(code == 0 ? 0 : code | (bits >> 24 & 0x80u));
}
MOE_RT_FN float decode_fp8(uint8_t code) {
  const uint32_t exponent = code >> 3 & 15u, fraction = code & 7u, sign = uint32_t(code & 0x80u) << 24;
  const float magnitude = exponent == 0 ? float(fraction) * 0.001953125f  // 2^-9
                                        : bits_float((exponent + 120u) << 23 | fraction << 20);
  return bits_float(float_bits(magnitude) | sign);
}

MOE_RT_FN uint8_t encode_int8(float x) { return uint8_t(int8_t(int32_t(round_even(x)))); }
MOE_RT_FN float decode_int8(uint8_t code) { return float(int8_t(code)); }

// Scale and its reciprocal, from the bits of a block's largest magnitude. A block below 2^-100 counts as zero, because
// its scale's reciprocal would overflow.
struct CodecScale {
  float scale, inverse;
};
MOE_RT_FN CodecScale codec_scale(Codec codec, uint32_t largest_bits) {
  constexpr uint32_t kInfinity = 0x7f800000u, kTiny = 27u << 23;
  if (largest_bits >= kInfinity) return {bits_float(0x7fc00000u), 0.0f};
  if (largest_bits < kTiny) return {0.0f, 0.0f};
  const float largest = bits_float(largest_bits), code = codec == Codec::kFp8 ? 448.0f : 127.0f;
  return {largest / code, code / largest};
}

MOE_RT_FN uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

MOE_RT_FN uint8_t encode(Codec codec, float x, float inverse) {
  const float scaled = inverse == 0.0f ? 0.0f : x * inverse;
  return codec == Codec::kFp8 ? encode_fp8(scaled) : encode_int8(scaled);
}

MOE_RT_FN float decode(Codec codec, uint8_t code, float scale) {
  return (codec == Codec::kFp8 ? decode_fp8(code) : decode_int8(code)) * scale;
}

}  // namespace moe_rt
