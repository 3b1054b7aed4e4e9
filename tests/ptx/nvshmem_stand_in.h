// Replaces cuda/gpu/nvshmem_prelude.h: NVSHMEM's functions without bodies; network.h implements them.
#pragma once

#include <cuda/std/cstddef>
#include <cuda/std/cstdint>

#define NVSHMEM_FUNCTION(Returned, name, ...) extern "C" __device__ Returned name(__VA_ARGS__);
#include "nvshmem_functions.h"
#undef NVSHMEM_FUNCTION

enum { NVSHMEM_SIGNAL_SET = 9 };

namespace moe_rt {

using NvshmemWord = unsigned long;

__device__ inline NvshmemWord* nvshmem_word(unsigned long long* word) { return reinterpret_cast<NvshmemWord*>(word); }

}  // namespace moe_rt
