// The CUDA kernels of two levels among ranks that map each other, as a rehearsal: gets and puts are copies.
#include "forwarding.h"
#include "mapped_net.h"

namespace moe_rt {
using Links = NodeLinks<MappedNet>;
}

#include "forward_entry_points.h"
