// How much memory launches need besides their tensors, and the tokens of a routing tile: the same for host and device.
#pragma once

#include "../protocol/flat/index.h"
#include "../protocol/flat/routing_tiles.h"

namespace moe_rt {

// What every GPU grants a block without asking, less what the frame keeps for itself.
inline constexpr int64_t kScratchBytes = 48 * 1024 - 64;

// A token per lane, or fewer where the destination's experts leave no room for that many; whole warps.
MOE_RT_FN int32_t tile_for(int32_t lanes, int32_t num_local) {
  int32_t tile = lanes;
  while (tile > 32 && Tiles::num_ints(tile, num_local) * 4 > kScratchBytes) tile = int32_t(round_up(tile / 2, 32));
  return tile;
}

MOE_RT_FN int64_t scratch_bytes(const World& w, int32_t lanes) {
  int64_t ints = Blocks::num_ints(w.shape, w.num_local_experts());
  for (int r = 0; r < w.shape.num_ranks; ++r) {
    const int32_t num_local = w.placement.rank_first[r + 1] - w.placement.rank_first[r];
    const int64_t tiles = Tiles::num_ints(tile_for(lanes, num_local), num_local);
    ints = tiles > ints ? tiles : ints;
  }
  return ints * 4;
}

// Symmetric memory of this rank besides its segment, and the segment as the network knows it.
struct NetworkMemory {
  char* segment;
  Header* outbox;  // [kinds][R][2] headers on their way
  char* staging;   // a row for each warp of a launch
  int64_t row_bytes;
};
static_assert(sizeof(NetworkMemory) == 32, "the host's layout");

// Symmetric memory that reaching unmapped peers takes: headers on their way, a staging row for each warp of a launch,
// and for each peer room for what its route lists say.
struct NetworkLayout {
  int64_t staging, mirrors, mirror_bytes, bytes;  // the headers are at 0

  MOE_RT_FN static NetworkLayout make(const Shape& s, int64_t num_warps) {
    const Layout::Window window = Layout::make(s).window[0];
    NetworkLayout n{};
    n.staging = round_up(int64_t{kNumKinds} * s.num_ranks * 2 * int64_t{sizeof(Header)}, kPage);
    n.mirrors = round_up(n.staging + num_warps * s.row_bytes(), kPage);
    n.mirror_bytes = window.tokens - window.counts;
    n.bytes = n.mirrors + s.num_ranks * n.mirror_bytes;
    return n;
  }
};

}  // namespace moe_rt
