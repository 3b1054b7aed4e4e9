// The machine of blocks and lanes that role bodies run on: CUDA's. tests/device/emulation.cpp has the one of threads.
#pragma once

#include "exchange.h"

namespace moe_rt {

struct BlockCoop {
  MOE_RT_FN int rank() const { return int(threadIdx.x); }
  MOE_RT_FN int size() const { return int(blockDim.x); }
  MOE_RT_FN void sync() const { __syncthreads(); }
};

// What lanes of a warp do together, each of which runs all of a role, so that branches do not diverge.
struct WarpLanes {
  static constexpr int kTeamLanes = 32;
  __device__ static int team_lane() { return int(threadIdx.x) % kTeamLanes; }
  // Of each kLanes neighbouring lanes.
  template <int kLanes>
  __device__ static uint32_t team_max(uint32_t x) {
    if constexpr (kLanes == kTeamLanes) return __reduce_max_sync(0xffffffffu, x);
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, x, mask);
      x = other > x ? other : x;
    }
    return x;
  }
};

// The lanes of one warp, on one row after another.
struct WarpGroup : WarpLanes {
  int64_t index, count;
  __device__ WarpGroup(int64_t i, int64_t n) : index(i), count(n) {}
  __device__ Range share(int64_t n) const { return {index, n, count}; }
  __device__ bool leader() const { return lane() == 0; }
  __device__ void sync() const { __syncwarp(); }
  __device__ int lane() const { return team_lane(); }
  __device__ static constexpr int lanes() { return kTeamLanes; }
  __device__ static constexpr int team() { return 0; }
  __device__ static constexpr int teams() { return 1; }
  template <class T>
  __device__ T sum(T x) const {
    for (int mask = kTeamLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  }
};

// Some warps of a block on one row after another. These are only moved and summed element by element: no warp waits for
// another, and there is no sum over lanes.
struct WarpsGroup : WarpLanes {
  int64_t index, count;
  int lane_, lanes_;
  __device__ WarpsGroup(int64_t i, int64_t n, int lane, int lanes) : index(i), count(n), lane_(lane), lanes_(lanes) {}
  __device__ Range share(int64_t n) const { return {index, n, count}; }
  __device__ bool leader() const { return lane_ == 0; }
  __device__ int lane() const { return lane_; }
  __device__ int lanes() const { return lanes_; }
  __device__ int team() const { return lane_ / kTeamLanes; }
  __device__ int teams() const { return lanes_ / kTeamLanes; }
};

// How the peers of this build are reached; part of every launch's arguments.
struct MappedLinks {
  static constexpr bool kWarpsOnly = false, kTwoLevel = false, kOrderedSignals = true;
  uint64_t unused;
  __device__ MappedLink link() const { return {}; }
  template <class Group>
  __device__ MappedLink link(const Group&) const {
    return {};
  }
};

// Of a launch of any number of blocks, or of one alone.
template <class Links, bool kOneBlock = false>
struct CudaMachine {
  static constexpr bool kWarpsOnly = Links::kWarpsOnly, kTwoLevel = Links::kTwoLevel,
                        kOrderedSignals = Links::kOrderedSignals;
  static constexpr unsigned kNapNs = 32;
  const Links& links;
  BlockShared& shared_;
  int32_t* scratch_;

  __device__ BlockCoop block() const { return {}; }
  __device__ BlockShared& shared() const { return shared_; }
  __device__ int32_t* scratch() const { return scratch_; }
  __device__ int num_blocks() const { return kOneBlock ? 1 : int(gridDim.x); }
  __device__ int block_index() const { return kOneBlock ? 0 : int(blockIdx.x); }
  __device__ int64_t clock_ns() const {
    int64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  __device__ void nap() const { __nanosleep(kNapNs); }
  // Of launches that depend on each other, which GPUs have from compute capability 9.0 on. The next may begin once all
  // blocks have come here or ended.
  __device__ void let_next_begin() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }
  // Until the launch before has ended, and what it wrote can be read here; at once where it ended before this one began.
  __device__ void await_launch_before() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }
  __device__ WarpGroup warps(int first_block) const {
    const int64_t blocks = num_blocks() - first_block, each = int(blockDim.x) / WarpGroup::kTeamLanes;
    return {int(threadIdx.x) / WarpGroup::kTeamLanes * blocks + block_index() - first_block, each * blocks};
  }
  __device__ WarpsGroup warps(int first_block, int together) const {
    const int64_t blocks = num_blocks() - first_block, lanes = together * WarpsGroup::kTeamLanes;
    const int first = int(threadIdx.x) / int(lanes);
    return {first * blocks + block_index() - first_block, int(blockDim.x) / int(lanes) * blocks,
            int(threadIdx.x) - first * int(lanes), int(lanes)};
  }
  __device__ auto link() const { return links.link(); }
  template <class Group>
  __device__ auto link(const Group& group) const {
    return links.link(group);
  }
};

}  // namespace moe_rt
