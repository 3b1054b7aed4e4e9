// CUDA kernels of a rank whose rows go in two levels, linked with NVSHMEM's device library.
//
// The compile step has included nvshmem_prelude.h.
#include "forwarding.h"
#include "nvshmem_net.h"

namespace moe_rt {
using Links = NodeLinks<Nvshmem>;
}

#define MOE_RT_TWO_LEVEL
#include "entry_points.h"
