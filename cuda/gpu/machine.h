// CUDA's machine of blocks and lanes that op bodies run on. tests/device/emulation.cpp has a machine of host threads.
#pragma once

#include "exchange.h"

namespace moe_rt {

struct BlockCoop {
  MOE_RT_FN int rank() const { return int(threadIdx.x); }
  MOE_RT_FN int size() const { return int(blockDim.x); }
  MOE_RT_FN void sync() const { __syncthreads(); }
};

// Warp operations of groups in which each lane runs all of a role, so that branches do not diverge.
struct WarpLanes {
  static constexpr int kTeamLanes = 32;
  __device__ static int team_lane() { return int(threadIdx.x) % kTeamLanes; }
  // Maximum over each kLanes neighbouring lanes.
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

// Lanes of one warp, which take one row after another.
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

// Several warps of a block, which take one row after another. They only move rows and sum element by element: no warp
// waits for another, and no sum over lanes exists.
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

// Links to mapped peers. A Links object is part of every launch's arguments.
struct MappedLinks {
  static constexpr bool kWarpsOnly = false, kTwoLevel = false, kOrderedSignals = true;
  uint64_t unused;
  __device__ MappedLink link() const { return {}; }
  template <class Group>
  __device__ MappedLink link(const Group&) const {
    return {};
  }
};

// Machine of a launch with any number of blocks, or with exactly one.
template <class Links, bool kOneBlock = false>
struct CudaMachine {
  static constexpr bool kWarpsOnly = Links::kWarpsOnly, kTwoLevel = Links::kTwoLevel,
                        kOrderedSignals = Links::kOrderedSignals;
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
  __device__ void nap() const { __nanosleep(tuning::kDeviceNapNs); }
  // Lets the next launch begin once all blocks have called this or ended: programmatic dependent launch, from compute
  // capability 9.0 on.
  __device__ void let_next_begin() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }
  // Waits until the previous launch has ended and its writes are visible here; returns immediately if it had already
  // ended.
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
