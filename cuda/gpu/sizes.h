// Memory that launches need in addition to their tensors, and tokens of a routing tile, identical on host and device.
#pragma once

#include "../protocol/core/tuning.h"
#include "../protocol/flat/index.h"
#include "../protocol/flat/routing_tiles.h"

namespace moe_rt {

// Shared memory that every GPU grants a block without opt-in, less the bytes that the frame uses.
inline constexpr int64_t kScratchBytes = 48 * 1024 - 64;
static_assert(kScratchBytes / 12 <= kMaxPlaces, "an expert takes a set of bits and two counts, and fits an entry");

// Tokens of a tile: kEntriesPerLane for each lane, or fewer if experts and ranks leave too little space, so that steps are few
// and small batches are one tile. A tile of more than 32 tokens fills whole words of bits.
MOE_RT_FN int32_t tile_for(int32_t lanes, const Shape& s) {
  int32_t tokens = tuning::kEntriesPerLane * lanes / s.num_topk;
  if (tokens > 32) tokens -= tokens % 32;
  while (tokens > 1 && Tiles::num_ints(s, tokens) * 4 > kScratchBytes) tokens = tokens > 32 ? tokens - 32 : tokens / 2;
  return tokens > 1 ? tokens : 1;
}

inline constexpr int32_t kWholeTokens = tuning::kWholeTokens;

// Copies that the block of a whole op makes: the tables that routing reads and the op's short inputs, loaded in one
// round trip to memory. They follow the block's routing tile.
template <class Weight>
struct WholeScratch {
  char** base;          // [R]
  Weight* weights;      // [kWholeTokens][K]
  int32_t* entries;     // [E]
  int32_t* rank_first;  // [R + 1]
  int32_t* ids;         // [kWholeTokens][K]; or combine's send plan

  MOE_RT_FN static int64_t tile_ints(const Shape& s) { return round_up(Tiles::num_ints(s, kWholeTokens), 4); }
  MOE_RT_FN static int64_t num_ints(const Shape& s) {
    const int64_t short_inputs = int64_t{kWholeTokens} * s.num_topk * (1 + int64_t{sizeof(Weight)} / 4);
    return tile_ints(s) + 3 * int64_t{s.num_ranks} + 1 + s.num_experts + short_inputs;
  }
  MOE_RT_FN static WholeScratch view(int32_t* ints, const Shape& s) {
    WholeScratch v{};
    v.base = reinterpret_cast<char**>(ints + tile_ints(s));
    v.weights = reinterpret_cast<Weight*>(v.base + s.num_ranks);
    v.entries = reinterpret_cast<int32_t*>(v.weights + int64_t{kWholeTokens} * s.num_topk);
    v.rank_first = v.entries + s.num_experts;
    v.ids = v.rank_first + s.num_ranks + 1;
    return v;
  }
};

// kWholeTokens, or 0 if a block has no space for the copies or rows cannot be pushed.
MOE_RT_FN int32_t whole_tokens(const Shape& s) {
  const int64_t ints = s.acc_bytes == 8 ? WholeScratch<double>::num_ints(s) : WholeScratch<float>::num_ints(s);
  return ints * 4 > kScratchBytes || s.num_pushed_rows < s.num_max_tokens ? 0 : kWholeTokens;
}

MOE_RT_FN int64_t scratch_bytes(const World& w, int32_t lanes) {
  const int64_t blocks = Blocks::num_ints(w.shape, w.num_local_experts());
  const int64_t tiles = Tiles::num_ints(w.shape, tile_for(lanes, w.shape));
  const int64_t whole = whole_tokens(w.shape) > 0 ? WholeScratch<double>::num_ints(w.shape) : 0;
  return 4 * max_of(max_of(tiles, blocks), whole);
}

// Symmetric memory of this rank in addition to its segment, and the segment's address in the network.
struct NetworkMemory {
  char* segment;
  Header* outbox;  // [kinds][R][2] headers being sent
  char* staging;   // staging rows of each warp of a launch
  int64_t warp_bytes;
  MOE_RT_FN char* scratch_of(int64_t warp) const { return staging + warp * warp_bytes; }
};
static_assert(sizeof(NetworkMemory) == 32, "the host's layout");

// Handles of NCCL's network, for gin_net.h: a communicator in this GPU's memory, the windows of the rank's segment and
// of its other symmetric memory, and the addresses of both.
struct GinHandles {
  const void* comm;
  void *segment_window, *memory_window;
  const char *segment, *memory;
  int64_t segment_bytes;
};

// Symmetric memory for reaching unmapped peers: headers being sent, a staging row for each warp of a launch, and space
// for each peer's route lists. In two levels a warp has two rows, a sum and its codes, and lists are staged in the
// segments.
struct NetworkLayout {
  int64_t staging, warp_bytes, mirrors, mirror_bytes, bytes;  // offsets and sizes in bytes; the headers are at 0

  MOE_RT_FN static NetworkLayout make(const Shape& s, int64_t num_warps) {
    const Layout::Window window = Layout::make(s).window[0];
    NetworkLayout n{};
    n.staging = round_up(int64_t{kNumKinds} * s.num_ranks * 2 * int64_t{sizeof(Header)}, kPage);
    n.warp_bytes = s.two_level() ? 2 * s.row_bytes() : max_of(s.row_bytes(), s.returned_row_bytes());
    n.mirrors = round_up(n.staging + num_warps * n.warp_bytes, kPage);
    n.mirror_bytes = s.two_level() ? 0 : window.tokens - window.counts;
    n.bytes = n.mirrors + s.num_ranks * n.mirror_bytes;
    return n;
  }
};

}  // namespace moe_rt
