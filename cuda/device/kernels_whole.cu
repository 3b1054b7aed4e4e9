// The CUDA kernels of a rank whose buffer is for very few tokens, all of whose peers are mapped: whole ops.
#include "machine.h"
#include "whole_ops.h"

namespace moe_rt {
using Links = MappedLinks;
}

#define MOE_RT_WHOLE_OPS
#include "entry_points.h"
