// The emulated GPU with sizes and types as constants, defined as for the just-in-time compiler: rows are moved in the
// widest vectors that divide them. Blocks consist of whole warps, and all peers are mapped.
#include "emulated_ring.h"
#include "emulation.h"

using namespace moe_rt;

extern "C" emulation::Room* emulated_room(int blocks) { return new emulation::Room(blocks); }

// See emulated_launch of emulation.cpp, which determines at run time what is constant here.
extern "C" int emulated_launch(emulation::Room* room, const char* kernel, const char*, int, int, int, int, int blocks,
                               int threads, int64_t shared_bytes, void** params, char* const*, uint32_t seed) {
  using Dims = FixedDims<MOE_RT_HIDDEN, MOE_RT_TOPK, Codec::MOE_RT_DISPATCH_CODEC, Codec::MOE_RT_COMBINE_CODEC,
                         Sums::MOE_RT_SUMS>;
  const World& w = *static_cast<const World*>(params[0]);
  const Control& c = *static_cast<const Control*>(params[1]);
  uint32_t known = 1;
  emulation::launch<32>(emulation::mapped_links(params), blocks, threads, shared_bytes, seed, room, [&](const auto& m) {
    if (!emulation::run_body<Dims, MOE_RT_ELEM>(kernel, m, Dims{}, w, c, params[3])) store_relaxed(known, 0u);
  });
  return static_cast<int>(known);
}
