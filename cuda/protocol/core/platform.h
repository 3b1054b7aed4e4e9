// Compiler differences: function qualifiers, fixed-width types and small helpers that all compilers share.
//
// The protocol headers compile under g++ (CPU ranks), nvcc and NVRTC (CUDA ranks). They use no standard library beyond
// fixed-width integers, because NVRTC has none.
#pragma once

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#else
#include <cstddef>
#include <cstdint>
#include <type_traits>
#endif

#if defined(__CUDACC_RTC__)
#define MOE_RT_FN __device__ inline
#elif defined(__CUDACC__)
#define MOE_RT_FN __host__ __device__ inline
#else
#define MOE_RT_FN inline
#endif

namespace moe_rt {

#if defined(__CUDACC_RTC__)
using cuda::std::conditional_t;
using cuda::std::int16_t;
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::is_trivially_copyable_v;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
#else
using std::conditional_t;
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::is_trivially_copyable_v;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
#endif

MOE_RT_FN constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

MOE_RT_FN int popcount(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// True if x is in [0, end).
MOE_RT_FN constexpr bool below(int64_t x, int64_t end) { return x >= 0 && x < end; }

template <class T>
MOE_RT_FN constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
MOE_RT_FN constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

// Makes a member of a struct from its list of fields.
#define MOE_RT_MEMBER(type, name) type name;

}  // namespace moe_rt
