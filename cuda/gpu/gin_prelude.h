// NCCL's device headers for NVRTC; the compile step includes this before a source that is linked with NCCL.
//
// The headers are in their form for linking: functions are declared here, and libnccl_device.ltoir has their bodies. As
// in nvshmem_prelude.h, the library's uint64_t is `unsigned long` and NVRTC's is `unsigned long long`: CCCL and the
// CUDA headers keep their own type and are therefore included first. The functions of groups of lanes are inline in any
// case; their header is included before the wrapper, which would omit it. Headers of the host's C and C++ that NCCL
// includes are empty (moe_rt/engine/gpu/nvrtc.py), because NCCL needs nothing from them here that NVRTC lacks.
#pragma once

#if !defined(__CUDACC_RTC__)
#error "gin_prelude.h is for NVRTC only"
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cuda/atomic>
#include <cuda/std/algorithm>
#include <cuda/std/array>
#include <cuda/std/cassert>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>

using moe_rt_nccl_uint64_t = unsigned long;
#define uint64_t moe_rt_nccl_uint64_t
#include <nccl_device/coop.h>
#include <nccl_device_wrapper.h>
#undef uint64_t

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 32, 0)
#error "NCCL's functions for strong signals at any address can be linked from 2.32 on"
#endif
