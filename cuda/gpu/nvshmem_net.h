// NVSHMEM's device interface as a network of the kernels (rdma.h). The compile step has included nvshmem_prelude.h.
#pragma once

#include "machine.h"

namespace moe_rt {

// NVSHMEM calls of the kernels: blocking gets and puts by warps or blocks, all others by one lane.
struct Nvshmem {
  static constexpr bool kOrderedSignals = true;
  __device__ void get(const WarpGroup&, void* here, const void* there, int64_t bytes, int pe) const {
    nvshmemx_getmem_warp(here, there, size_t(bytes), pe);
  }
  __device__ void get(const BlockCoop&, void* here, const void* there, int64_t bytes, int pe) const {
    nvshmemx_getmem_block(here, there, size_t(bytes), pe);
  }
  __device__ void put(const WarpGroup&, void* there, const void* here, int64_t bytes, int pe) const {
    nvshmemx_putmem_warp(there, here, size_t(bytes), pe);
  }
  __device__ void put_value(float* there, float value, int pe) const { nvshmem_float_p(there, value, pe); }
  __device__ void put_value(double* there, double value, int pe) const { nvshmem_double_p(there, value, pe); }
  __device__ void put_signal(Header* there, const Header* here, uint64_t* signal, uint64_t seq, int pe) const {
    nvshmem_putmem_signal(there, here, sizeof(Header), nvshmem_word(signal), seq, NVSHMEM_SIGNAL_SET, pe);
  }
  // The first poison word stays.
  __device__ void poison(uint64_t* there, uint64_t word, int pe) const {
    nvshmem_uint64_atomic_compare_swap(nvshmem_word(there), 0, word, pe);
  }
  __device__ void mark(uint64_t* there, int pe) const { nvshmem_uint64_p(nvshmem_word(there), 1, pe); }
  __device__ void before_signals() const { quiet(); }
  __device__ void quiet() const { nvshmem_quiet(); }
  __device__ void fence() const { nvshmem_fence(); }
};

}  // namespace moe_rt
