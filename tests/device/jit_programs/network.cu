// Every NVSHMEM function that the protocol needs, together with the protocol's headers and types.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "../protocol/core/atomics.h"
#include "../protocol/core/layout.h"

using moe_rt::nvshmem_word;
using moe_rt::uint64_t;

static_assert(sizeof(uint64_t) == 8 && uint64_t(-1) > 0);

extern "C" __global__ void talks(uint64_t* signal, char* here, char* there, size_t bytes, int peer) {
  nvshmemx_getmem_block(here, there, bytes, peer);
  nvshmemx_putmem_warp(there, here, bytes, peer);
  nvshmemx_putmem_nbi_warp(there, here, bytes, peer);
  nvshmem_quiet();
  nvshmem_putmem_signal(there, here, bytes, nvshmem_word(signal), 1, NVSHMEM_SIGNAL_SET, peer);
  nvshmemx_signal_op(nvshmem_word(signal), 2, NVSHMEM_SIGNAL_SET, peer);
  const uint64_t before = nvshmem_uint64_atomic_compare_swap(nvshmem_word(signal), 1, 2, peer);
  moe_rt::store_release(*signal, before);
}

extern "C" __global__ void keeps_to_itself(uint64_t* signal) {
  __shared__ uint64_t words[32];
  words[threadIdx.x] = moe_rt::load_acquire(signal[threadIdx.x]);
  __syncthreads();
  signal[threadIdx.x] = words[31 - threadIdx.x];
}
