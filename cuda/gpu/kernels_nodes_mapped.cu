// CUDA kernels of two levels for tests among ranks that map each other: gets and puts are copies.
#include "forwarding.h"
#include "mapped_net.h"

namespace moe_rt {
using Links = NodeLinks<MappedNet>;
}

#define MOE_RT_TWO_LEVEL
#include "entry_points.h"
