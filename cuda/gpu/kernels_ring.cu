// CUDA kernels of a rank whose launches have few blocks and whose peers are all mapped: raw rows go through shared
// memory (moving.h).
#include "bulk.h"

namespace moe_rt {
using Links = RingLinks;
}

#include "entry_points.h"
