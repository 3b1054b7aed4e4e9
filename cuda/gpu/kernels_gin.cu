// CUDA kernels of a rank that reaches some peers over a network, linked with NCCL's device library.
//
// The compile step has included gin_prelude.h.
#include "gin_net.h"
#include "machine.h"

namespace moe_rt {
using Links = RdmaLinks<Gin>;
}

#include "entry_points.h"

MOE_RT_KERNEL_CALLING(dispatch_fetch, moe_rt::DispatchArgs, false, moe_rt::fetch_lists(launch, a))
