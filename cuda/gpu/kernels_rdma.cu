// CUDA kernels of a rank that reaches some peers over a network, linked with NVSHMEM's device library.
//
// The compile step has included nvshmem_prelude.h.
#include "nvshmem_net.h"
#include "rdma.h"

namespace moe_rt {
using Links = RdmaLinks<Nvshmem>;
}

#include "entry_points.h"

MOE_RT_KERNEL_CALLING(dispatch_fetch, moe_rt::DispatchArgs, false, moe_rt::fetch_lists(launch, a))
