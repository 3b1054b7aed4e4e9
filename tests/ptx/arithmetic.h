// PTX arithmetic that C++ lacks or defines differently: wrap-around, clamped shifts, bytes, roundings.
#pragma once

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lane.h"

namespace ptx {

// 16-bit floating-point types, used only for widening and rounding. Every NaN becomes the same.
struct Half {
  uint16_t word;
  explicit Half(uint16_t bits) : word(bits) {}
  explicit Half(float x) : word(std::isnan(x) ? 0x7fff : std::bit_cast<uint16_t>(static_cast<_Float16>(x))) {}
  explicit operator float() const { return std::bit_cast<_Float16>(word); }
};

struct BFloat {
  uint16_t word;
  explicit BFloat(uint16_t bits) : word(bits) {}
  explicit BFloat(float x) {
    const uint32_t wide = std::bit_cast<uint32_t>(x);
    word = std::isnan(x) ? 0x7fff : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{word} << 16); }
};

// Round to the nearest 8-bit code with 4 exponent bits (E4M3), ties to even. Infinity becomes the largest number; only
// one NaN exists.
inline uint32_t e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::fabs(double(x));
  if (magnitude >= 448) return sign | 0x7e;
  const int exponent = magnitude == 0 ? -6 : std::max(std::ilogb(magnitude), -6);
  // Units of the last place: 8 to 16, or fewer than 8 below 2^-6. Sixteen units are eight of the next exponent.
  const int units = int(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | uint32_t(8 * (exponent + 6) + units);
}

// Return a register's bits as a value of another type of that width, or truncated to a narrower integer type.
template <class T, class Bits>
T as(Bits bits) {
  if constexpr (std::is_floating_point_v<T>) {
    using Same = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    return std::bit_cast<T>(Same(bits));
  } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>) {
    return T(uint16_t(bits));
  } else {
    return T(bits);
  }
}

// Return the bits that are written to a register. Integers are sign-extended to its width.
template <class T>
auto bits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<uint32_t>(value);
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<uint64_t>(value);
  } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>) {
    return value.word;
  } else {
    return value;
  }
}

template <class T>
T load(const void* from, int index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + index * int(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store(void* to, int index, T value) {
  std::memcpy(static_cast<char*>(to) + index * int(sizeof(T)), &value, sizeof(T));
}

template <class T>
T add(T a, T b) {
  return T(uint64_t(a) + uint64_t(b));
}
template <class T>
T subtract(T a, T b) {
  return T(uint64_t(a) - uint64_t(b));
}
template <class T>
T multiply(T a, T b) {
  return T(uint64_t(a) * uint64_t(b));
}
// Division by zero is undefined in PTX. The largest number makes it visible.
template <class T>
T divide(T a, T b) {
  if (b == 0) return std::numeric_limits<T>::max();
  if (std::is_signed_v<T> && b == T(-1)) return subtract(T(0), a);
  return T(a / b);
}
template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return std::numeric_limits<T>::max();
  if (std::is_signed_v<T> && b == T(-1)) return 0;
  return T(a % b);
}
template <class T>
T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T larger(T a, T b) {
  return a < b ? b : a;
}

// Shifts by the width or more give zeros or sign bits.
template <class T>
T shift_left(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T(0) : T(uint64_t(a) << by);
}
template <class T>
T shift_right(T a, uint32_t by) {
  const uint32_t most = 8 * sizeof(T) - 1;
  if (by > most) return std::is_signed_v<T> ? T(a >> most) : T(0);
  return T(a >> by);
}

// Choose four of the eight bytes of b and a. A selector's highest bit replicates that byte's sign.
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15;
    uint32_t byte = uint32_t(bytes >> (8 * (selector & 7))) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << (8 * i);
  }
  return out;
}

// Replace `length` bits of b, starting at bit `at`, with the low bits of a.
template <class T>
T insert(T a, T b, T at, T length) {
  const uint32_t width = 8 * sizeof(T), from = uint32_t(at) & 255, many = uint32_t(length) & 255;
  T mask = many >= width ? T(~T(0)) : T((T(1) << many) - 1);
  mask = shift_left(mask, from);
  return T((shift_left(a, from) & mask) | (b & ~mask));
}

template <class T>
bool ordered(T a, T b, bool result) {
  return !std::isnan(a) && !std::isnan(b) && result;
}
template <class T>
bool unordered(T a, T b, bool result) {
  return std::isnan(a) || std::isnan(b) || result;
}

// Convert to an integer, rounding towards zero. NaN becomes zero; values out of range saturate.
template <class To, class From>
To truncate(From x) {
  if (std::isnan(x)) return 0;
  const From t = std::trunc(x);
  if (t <= From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (t >= From(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return To(t);
}

template <class T>
T saturate(T x) {
  if (!(x > T(0))) return T(0);
  return x > T(1) ? T(1) : x;
}

inline float fma_down(float a, float b, float c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float va = a, vb = b, vc = c;
  volatile float out = std::fma(va, vb, vc);
  std::fesetround(before);
  return out;
}

// A GPU approximates ex2; this is the nearest float. Subnormal inputs and outputs are flushed to zero.
inline float exp2_flushed(float x) {
  const float y = float(std::exp2(double(std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x)));
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y;
}

}  // namespace ptx
