// CUDA kernels of a rank whose buffer is for very few tokens and whose peers are all mapped: dispatch and combine take
// one launch each.
#include "machine.h"
#include "whole_ops.h"

namespace moe_rt {
using Links = MappedLinks;
}

#define MOE_RT_WHOLE_OPS
#include "entry_points.h"
