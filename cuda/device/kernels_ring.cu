// The CUDA kernels of a rank whose launches have few blocks, all of whose peers are mapped: rows as they are go through
// shared memory (ring.h).
#include "bulk.h"

namespace moe_rt {
using Links = RingLinks;
}

#include "entry_points.h"
