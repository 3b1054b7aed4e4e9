// Payload elements: conversion to the accumulator type and back with rounding, on a GPU and, for tests, on the CPU.
#pragma once

#include "../protocol/core/platform.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <cmath>
#include <cstring>
#endif

namespace moe_rt {

struct F32 {
  using Acc = float;
  float bits;
  MOE_RT_FN Acc wide() const { return bits; }
  MOE_RT_FN static F32 round(Acc x) { return {x}; }
};

struct F64 {
  using Acc = double;
  double bits;
  MOE_RT_FN Acc wide() const { return bits; }
  MOE_RT_FN static F64 round(Acc x) { return {x}; }
};

#if defined(__CUDACC__)

struct Bf16 {
  using Acc = float;
  __nv_bfloat16 bits;
  MOE_RT_FN Acc wide() const { return __bfloat162float(bits); }
  MOE_RT_FN static Bf16 round(Acc x) { return {__float2bfloat16_rn(x)}; }
};

struct F16 {
  using Acc = float;
  __half bits;
  MOE_RT_FN Acc wide() const { return __half2float(bits); }
  MOE_RT_FN static F16 round(Acc x) { return {__float2half_rn(x)}; }
};

#else

struct Bf16 {
  using Acc = float;
  uint16_t bits;
  Acc wide() const {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }
  // Rounds to nearest, ties to even; a NaN stays a NaN.
  static Bf16 round(Acc x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    if (std::isnan(x)) return {uint16_t(word >> 16 | 0x40)};
    return {uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16)};
  }
};

struct F16 {
  using Acc = float;
  _Float16 bits;
  Acc wide() const { return bits; }
  static F16 round(Acc x) { return {static_cast<_Float16>(x)}; }
};

// Calls fn(element) with a value of the type that the just-in-time compiler knows by this name; false if no such type
// exists.
template <class Fn>
bool with_element(const char* name, Fn&& fn) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("F32")) return fn(F32{}), true;
  if (is("Bf16")) return fn(Bf16{}), true;
  if (is("F16")) return fn(F16{}), true;
  if (is("F64")) return fn(F64{}), true;
  return false;
}

#endif

}  // namespace moe_rt
