// Compiled after NCCL's headers: checks that its functions have the signatures in gin_functions.h.
#include "../protocol/core/atomics.h"

using Order = cuda::std::remove_const_t<decltype(moe_rt::kAcquire)>;
#define NCCL_FUNCTION(Returned, name, ...) \
  static_assert(                           \
      cuda::std::is_same_v<decltype(static_cast<Returned (*)(__VA_ARGS__)>(&name)), Returned (*)(__VA_ARGS__)>);
#include "gin_functions.h"

static_assert(int(NCCL_GIN_SIGNAL_TYPE_NONE) == 0 && int(NCCL_GIN_SIGNAL_TYPE_VA) == 1 && int(ncclGinSignalInc) == 0);
extern "C" __global__ void nothing() {}
