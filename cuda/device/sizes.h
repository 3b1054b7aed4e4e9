// How much memory launches need besides their tensors, and the tokens of a routing tile: the same for host and device.
#pragma once

#include "../protocol/flat/index.h"
#include "../protocol/flat/routing_tiles.h"

namespace moe_rt {

// What every GPU grants a block without asking, less what the frame keeps for itself.
inline constexpr int64_t kScratchBytes = 48 * 1024 - 64;
static_assert(kScratchBytes / 8 <= kMaxPlaces, "an expert takes a set of bits and a count, and fits an entry");

// Two entries per lane, or fewer where experts and ranks leave no room for that many: few steps, and small batches are
// one tile. Whole words of bits where there are more tokens than one has.
MOE_RT_FN int32_t tile_for(int32_t lanes, const Shape& s) {
  int32_t tokens = 2 * lanes / s.num_topk;
  if (tokens > 32) tokens -= tokens % 32;
  while (tokens > 1 && Tiles::num_ints(s, tokens) * 4 > kScratchBytes) tokens = tokens > 32 ? tokens - 32 : tokens / 2;
  return tokens > 1 ? tokens : 1;
}

// Tokens of a rank, at most, in a buffer whose ops are whole: one launch of one block (whole_ops.h). By estimate one block
// is faster than two launches of many for so few (docs/cuda.md).
inline constexpr int32_t kWholeTokens = 2;

// What the block of a whole op has copied: the tables that routing reads and the op's short inputs, so that they come
// in one trip to memory. Its routing tile lies before.
template <class Weight>
struct WholeScratch {
  char** base;       // [R]
  Weight* weights;   // [kWholeTokens][K]
  int32_t* entries;  // [E]
  int32_t* ids;      // [kWholeTokens][K]; or of combine, its send plan

  MOE_RT_FN static int64_t tile_ints(const Shape& s) { return round_up(Tiles::num_ints(s, kWholeTokens), 4); }
  MOE_RT_FN static int64_t num_ints(const Shape& s) {
    const int64_t short_inputs = int64_t{kWholeTokens} * s.num_topk * (1 + int64_t{sizeof(Weight)} / 4);
    return tile_ints(s) + 2 * int64_t{s.num_ranks} + s.num_experts + short_inputs;
  }
  MOE_RT_FN static WholeScratch view(int32_t* ints, const Shape& s) {
    WholeScratch v{};
    v.base = reinterpret_cast<char**>(ints + tile_ints(s));
    v.weights = reinterpret_cast<Weight*>(v.base + s.num_ranks);
    v.entries = reinterpret_cast<int32_t*>(v.weights + int64_t{kWholeTokens} * s.num_topk);
    v.ids = v.entries + s.num_experts;
    return v;
  }
};

// As kWholeTokens, or none where a block has no room for the copies.
MOE_RT_FN int32_t whole_tokens(const Shape& s) {
  const int64_t ints = s.acc_bytes == 8 ? WholeScratch<double>::num_ints(s) : WholeScratch<float>::num_ints(s);
  return ints * 4 > kScratchBytes || s.num_pushed_rows < s.num_max_tokens ? 0 : kWholeTokens;
}

MOE_RT_FN int64_t scratch_bytes(const World& w, int32_t lanes) {
  const int64_t blocks = Blocks::num_ints(w.shape, w.num_local_experts());
  const int64_t tiles = Tiles::num_ints(w.shape, tile_for(lanes, w.shape));
  const int64_t whole = whole_tokens(w.shape) > 0 ? WholeScratch<double>::num_ints(w.shape) : 0;
  return 4 * larger(larger(tiles, blocks), whole);
}

// Symmetric memory of this rank besides its segment, and the segment as the network knows it.
struct NetworkMemory {
  char* segment;
  Header* outbox;  // [kinds][R][2] headers on their way
  char* staging;   // rows for each warp of a launch
  int64_t warp_bytes;
  MOE_RT_FN char* scratch_of(int64_t warp) const { return staging + warp * warp_bytes; }
};
static_assert(sizeof(NetworkMemory) == 32, "the host's layout");

// What the host knows of NCCL's network, for gin_net.h: a communicator in this GPU's memory, the windows of the rank's
// segment and of its other symmetric memory, and where they begin.
struct GinHandles {
  const void* comm;
  void *segment_window, *memory_window;
  const char *segment, *memory;
  int64_t segment_bytes;
};

// Symmetric memory that reaching unmapped peers takes: headers on their way, a staging row for each warp of a launch,
// and for each peer room for what its route lists say. In two levels a warp has two rows, a sum and its codes, and lists
// are staged in the segments.
struct NetworkLayout {
  int64_t staging, warp_bytes, mirrors, mirror_bytes, bytes;  // the headers are at 0

  MOE_RT_FN static NetworkLayout make(const Shape& s, int64_t num_warps) {
    const Layout::Window window = Layout::make(s).window[0];
    NetworkLayout n{};
    n.staging = round_up(int64_t{kNumKinds} * s.num_ranks * 2 * int64_t{sizeof(Header)}, kPage);
    n.warp_bytes = s.two_level() ? 2 * s.row_bytes() : s.row_bytes();
    n.mirrors = round_up(n.staging + num_warps * n.warp_bytes, kPage);
    n.mirror_bytes = s.two_level() ? 0 : window.tokens - window.counts;
    n.bytes = n.mirrors + s.num_ranks * n.mirror_bytes;
    return n;
  }
};

}  // namespace moe_rt
