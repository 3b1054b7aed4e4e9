// NVSHMEM's device headers for NVRTC; the compile step includes this before a source that is linked with NVSHMEM.
//
// Under NVRTC, CCCL's uint64_t is `unsigned long long`. The library was built with `unsigned long`, so the linker would
// not find its functions that take a uint64_t. CCCL and the CUDA headers keep their own type and are therefore included
// first; only NVSHMEM's text sees the other. Sources pass a signal of the protocol through nvshmem_word.
#pragma once

#if !defined(__CUDACC_RTC__)
#error "nvshmem_prelude.h is for NVRTC only"
#endif

// All headers that NVSHMEM includes and that name uint64_t.
#include <cuda_awbarrier_helpers.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_helpers.h>
#include <cuda_runtime.h>
#include <non_abi/nvshmem_version.h>

#include <cuda/atomic>
#include <cuda/std/array>
#include <cuda/std/cassert>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstdlib>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>

#if NVSHMEM_VENDOR_MAJOR_VERSION == 3 && NVSHMEM_VENDOR_MINOR_VERSION < 8
// Older headers name these, which NVRTC does not have.
namespace std {
using cuda::std::is_integral;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std
#endif

namespace moe_rt {
using NvshmemWord = unsigned long;
}

using moe_rt_nvshmem_uint64_t = moe_rt::NvshmemWord;
#define uint64_t moe_rt_nvshmem_uint64_t
#include <nvshmem.h>
#include <nvshmemx.h>
#undef uint64_t

namespace moe_rt {

// Converts a signal to the type that NVSHMEM's functions take.
__device__ inline NvshmemWord* nvshmem_word(unsigned long long* word) {
  static_assert(sizeof(NvshmemWord) == sizeof(unsigned long long));
  return reinterpret_cast<NvshmemWord*>(word);
}

}  // namespace moe_rt
