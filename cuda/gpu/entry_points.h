// The __global__ functions, each of which calls its body. The including file has chosen Links, the access to peers, and
// defines MOE_RT_WHOLE_OPS if dispatch and combine take one launch each (whole_ops.h), or MOE_RT_TWO_LEVEL if proxies
// forward rows between sending and receiving (forwarding.h).
//
// The just-in-time compiler defines MOE_RT_ELEM (F32, Bf16, F16 or F64), MOE_RT_HIDDEN, MOE_RT_TOPK, MOE_RT_THREADS,
// MOE_RT_DISPATCH_CODEC, MOE_RT_COMBINE_CODEC (kRaw, kFp8 or kInt8) and MOE_RT_SUMS (kRanked or kInvariant).
#pragma once

#include "machine.h"
#include "ops.h"

namespace moe_rt {

using JitDims =
    FixedDims<MOE_RT_HIDDEN, MOE_RT_TOPK, Codec::MOE_RT_DISPATCH_CODEC, Codec::MOE_RT_COMBINE_CODEC, Sums::MOE_RT_SUMS>;
using JitElem = MOE_RT_ELEM;

// Runs fn(body) on this block.
template <bool kOneBlock, class Fn>
__device__ __forceinline__ void run(const World& w, const Control& c, const Links& links, Fn&& fn) {
  extern __shared__ __align__(16) int32_t scratch[];
  __shared__ BlockShared shared;
  using Machine = CudaMachine<Links, kOneBlock>;
  const Machine machine{links, shared, scratch};
  fn(Launch<JitDims, JitElem, Machine>{machine, JitDims{}, w, c});
}

}  // namespace moe_rt

#define MOE_RT_KERNEL_CALLING(name, Args, one_block, call)                                     \
  extern "C" __global__ void __launch_bounds__(MOE_RT_THREADS, 1)                              \
      name(const __grid_constant__ moe_rt::World w, const __grid_constant__ moe_rt::Control c, \
           const __grid_constant__ moe_rt::Links links, const __grid_constant__ Args a) {      \
    moe_rt::run<one_block>(w, c, links, [&](const auto& launch) { call; });                    \
  }
#define MOE_RT_KERNEL(name, Args) MOE_RT_KERNEL_CALLING(name, Args, false, launch.name(a))

#if defined(MOE_RT_WHOLE_OPS)
MOE_RT_KERNEL_CALLING(dispatch_whole, moe_rt::DispatchArgs, true, moe_rt::dispatch_whole(launch, a))
MOE_RT_KERNEL_CALLING(combine_whole, moe_rt::CombineArgs, true, moe_rt::combine_whole(launch, a))
#else
MOE_RT_KERNEL(dispatch_send, moe_rt::DispatchArgs)
MOE_RT_KERNEL(dispatch_wait, moe_rt::DispatchArgs)
MOE_RT_KERNEL(dispatch_receive, moe_rt::DispatchArgs)
MOE_RT_KERNEL(combine_send, moe_rt::CombineArgs)
MOE_RT_KERNEL(combine_wait, moe_rt::CombineArgs)
MOE_RT_KERNEL(combine_receive, moe_rt::CombineArgs)
#endif
MOE_RT_KERNEL(combine_backward_send, moe_rt::CombineBackwardArgs)
MOE_RT_KERNEL(combine_backward_wait, moe_rt::CombineBackwardArgs)
MOE_RT_KERNEL(combine_backward_receive, moe_rt::CombineBackwardArgs)
MOE_RT_KERNEL(abort_group, moe_rt::EndArgs)
MOE_RT_KERNEL(leave, moe_rt::EndArgs)

#if defined(MOE_RT_TWO_LEVEL)
#define MOE_RT_FORWARD_KERNEL(name, Args) MOE_RT_KERNEL_CALLING(name, Args, false, moe_rt::Forwarding{launch}.name(a))

MOE_RT_FORWARD_KERNEL(dispatch_lists, moe_rt::DispatchArgs)
MOE_RT_FORWARD_KERNEL(dispatch_forward, moe_rt::DispatchArgs)
MOE_RT_FORWARD_KERNEL(combine_first_wait, moe_rt::CombineArgs)
MOE_RT_FORWARD_KERNEL(combine_forward, moe_rt::CombineArgs)
MOE_RT_FORWARD_KERNEL(combine_backward_first_wait, moe_rt::CombineBackwardArgs)
MOE_RT_FORWARD_KERNEL(combine_backward_forward, moe_rt::CombineBackwardArgs)
#endif
