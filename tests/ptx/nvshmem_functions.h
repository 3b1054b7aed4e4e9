// NVSHMEM's device functions that cuda/gpu calls, one a line: return type, name, parameter types.
//
// Included with NVSHMEM_FUNCTION defined, to declare them for a stand-in or to compare them with NVSHMEM's headers.
NVSHMEM_FUNCTION(void, nvshmemx_getmem_warp, void*, const void*, size_t, int)
NVSHMEM_FUNCTION(void, nvshmemx_getmem_block, void*, const void*, size_t, int)
NVSHMEM_FUNCTION(void, nvshmemx_putmem_warp, void*, const void*, size_t, int)
NVSHMEM_FUNCTION(void, nvshmem_float_p, float*, float, int)
NVSHMEM_FUNCTION(void, nvshmem_double_p, double*, double, int)
NVSHMEM_FUNCTION(void, nvshmem_uint64_p, unsigned long*, unsigned long, int)
NVSHMEM_FUNCTION(void, nvshmem_putmem_signal, void*, const void*, size_t, unsigned long*, unsigned long, int, int)
NVSHMEM_FUNCTION(unsigned long, nvshmem_uint64_atomic_compare_swap, unsigned long*, unsigned long, unsigned long, int)
NVSHMEM_FUNCTION(void, nvshmem_quiet)
NVSHMEM_FUNCTION(void, nvshmem_fence)
