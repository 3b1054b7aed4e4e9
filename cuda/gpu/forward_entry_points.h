// The __global__ functions of ranks on several nodes, each of which calls its body: those of entry_points.h, and the
// launches between sending and receiving. The including file has chosen Links.
#pragma once

#include "entry_points.h"
#include "forwarding.h"

#define MOE_RT_FORWARD_KERNEL(name, Args) MOE_RT_KERNEL_CALLING(name, Args, false, moe_rt::Forwarding{launch}.name(a))

MOE_RT_FORWARD_KERNEL(dispatch_lists, moe_rt::DispatchArgs)
MOE_RT_FORWARD_KERNEL(dispatch_forward, moe_rt::DispatchArgs)
MOE_RT_FORWARD_KERNEL(combine_first_wait, moe_rt::CombineArgs)
MOE_RT_FORWARD_KERNEL(combine_forward, moe_rt::CombineArgs)
MOE_RT_FORWARD_KERNEL(combine_backward_first_wait, moe_rt::CombineBackwardArgs)
MOE_RT_FORWARD_KERNEL(combine_backward_forward, moe_rt::CombineBackwardArgs)
