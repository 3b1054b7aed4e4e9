// CUDA kernels of a rank whose peers are all mapped: NVLink, or virtual ranks of one GPU.
#include "machine.h"

namespace moe_rt {
using Links = MappedLinks;
}

#include "entry_points.h"
