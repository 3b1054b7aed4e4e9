// Compiled after NVSHMEM's own headers: its functions are those that nvshmem_functions.h lists.
#include <cuda/std/type_traits>

#define NVSHMEM_FUNCTION(Returned, name, ...) \
  static_assert(                              \
      cuda::std::is_same_v<decltype(static_cast<Returned (*)(__VA_ARGS__)>(&name)), Returned (*)(__VA_ARGS__)>);
#include "nvshmem_functions.h"

static_assert(int(NVSHMEM_SIGNAL_SET) == 9);
