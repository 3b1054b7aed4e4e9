// Compiled after NVSHMEM's headers: checks that its functions have the signatures in nvshmem_functions.h.
#include <cuda/std/type_traits>

#define NVSHMEM_FUNCTION(Returned, name, ...) \
  static_assert(                              \
      cuda::std::is_same_v<decltype(static_cast<Returned (*)(__VA_ARGS__)>(&name)), Returned (*)(__VA_ARGS__)>);
#include "nvshmem_functions.h"

static_assert(int(NVSHMEM_SIGNAL_SET) == 9);
