// CUDA kernels of the experts' activation, for any number of columns.
//
// The just-in-time compiler defines MOE_RT_ELEM (F32, Bf16, F16 or F64) and MOE_RT_THREADS.
#include "activation.h"
#include "machine.h"

#define MOE_RT_ACTIVATION(name, Args)                                                                            \
  extern "C" __global__ void __launch_bounds__(MOE_RT_THREADS, 1) name(const __grid_constant__ moe_rt::Args a) { \
    __shared__ moe_rt::BlockShared unused;                                                                       \
    const moe_rt::MappedLinks links{};                                                                           \
    moe_rt::name<moe_rt::MOE_RT_ELEM>(moe_rt::CudaMachine<moe_rt::MappedLinks>{links, unused, nullptr}, a);      \
  }

MOE_RT_ACTIVATION(swiglu_forward, SwigluArgs)
MOE_RT_ACTIVATION(swiglu_backward, SwigluBackwardArgs)
