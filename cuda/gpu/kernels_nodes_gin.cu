// CUDA kernels of a rank whose rows go in two levels, linked with NCCL's device library.
//
// The compile step has included gin_prelude.h.
#include "forwarding.h"
#include "gin_net.h"

namespace moe_rt {
using Links = NodeLinks<Gin>;
}

#define MOE_RT_TWO_LEVEL
#include "entry_points.h"
