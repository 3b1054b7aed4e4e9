// The CUDA kernels of a rank all of whose peers are mapped: NVLink, or virtual ranks of one GPU.
#include "machine.h"

namespace moe_rt {
using Links = MappedLinks;
}

#include "entry_points.h"
