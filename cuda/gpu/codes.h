// Encoding and decoding of four codes in one word with few instructions, bit for bit as in protocol/core/codec.h.
//
// Multiplications by a block's scale or its reciprocal are the same as there. Every other operation is exact, or is the
// hardware's conversion with the same rounding.
#pragma once

#include "../protocol/core/codec.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace moe_rt {

// Selects four bytes of two words: one GPU instruction.
MOE_RT_FN uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selectors) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selectors);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (uint32_t(bytes >> 8 * (selectors >> 4 * i & 7u)) & 255u) << 8 * i;
  return out;
#endif
}

MOE_RT_FN float half_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
#else
  return float(__builtin_bit_cast(_Float16, uint16_t(bits)));
#endif
}

// encode_fp8 of four numbers already multiplied by a block's reciprocal; from sm_89 on one instruction converts two.
MOE_RT_FN uint32_t encode_four_fp8(const float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  const uint32_t codes = uint32_t{high} << 16 | low;
  // Zero has no sign: a sign bit stays only if adding 127 to the magnitude carries into it.
  return codes & (((codes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | 0x7f7f7f7fu);
#else
  uint32_t codes = 0;
  for (int i = 0; i < 4; ++i) codes |= uint32_t{encode_fp8(x[i])} << 8 * i;
  return codes;
#endif
}

// encode_int8 of four numbers: rounding by a shift leaves the integer in the low byte.
MOE_RT_FN uint32_t encode_four_int8(const float* x) {
  uint32_t shifted[4];
  for (int i = 0; i < 4; ++i) shifted[i] = float_bits(x[i] + 12582912.0f);  // see round_even
  return bytes_of(bytes_of(shifted[0], shifted[1], 0x40), bytes_of(shifted[2], shifted[3], 0x40), 0x5410);
}

// Codes of x[0, 4), starting at the lowest byte.
MOE_RT_FN uint32_t encode_four(Codec codec, const float* x, float inverse) {
  if (inverse == 0.0f) return 0;
  float scaled[4];
  for (int i = 0; i < 4; ++i) scaled[i] = x[i] * inverse;
  return codec == Codec::kFp8 ? encode_four_fp8(scaled) : encode_four_int8(scaled);
}

// Decodes the four numbers of a word. An e4m3 code shifted to a half's exponent position has 2^-8 of its value.
MOE_RT_FN void decode_four(Codec codec, uint32_t codes, float scale, float* x) {
  if (codec == Codec::kFp8) {
    const float factor = scale * 256.0f;  // exact: a scale is at most 2^128 / 448
    for (int i = 0; i < 4; i += 2) {
      const uint32_t high = bytes_of(codes, 0, i == 0 ? 0x1404 : 0x3424);  // one code in the upper byte of each 16 bits
      const uint32_t halves = (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
      x[i] = half_of(halves & 0xffffu) * factor;
      x[i + 1] = half_of(halves >> 16) * factor;
    }
    return;
  }
  const uint32_t biased = codes ^ 0x80808080u;
  for (int i = 0; i < 4; ++i) {  // 2^23 + 128 + the integer, as a float
    x[i] = (bits_float(bytes_of(biased, 0x4b000000u, 0x7440 + i)) - 8388736.0f) * scale;
  }
}

}  // namespace moe_rt
