// The machine of blocks and lanes that role bodies run on: CUDA's. tests/device/emulation.cpp has the one of threads.
#pragma once

#include "exchange.h"

namespace moe_rt {

struct BlockCoop {
  MOE_RT_FN int rank() const { return int(threadIdx.x); }
  MOE_RT_FN int size() const { return int(blockDim.x); }
  MOE_RT_FN void sync() const { __syncthreads(); }
};

// The lanes of one warp, on one row after another; every lane runs the role, so branches do not diverge.
struct WarpGroup {
  static constexpr int kLanes = 32, kTeamLanes = kLanes;
  int64_t index, count;
  __device__ Range share(int64_t n) const { return {index, n, count}; }
  __device__ bool leader() const { return lane() == 0; }
  __device__ void sync() const { __syncwarp(); }
  __device__ int lane() const { return int(threadIdx.x) % kLanes; }
  __device__ static constexpr int lanes() { return kLanes; }
  __device__ static constexpr int team() { return 0; }
  __device__ static constexpr int teams() { return 1; }
  __device__ int team_lane() const { return lane(); }
  __device__ uint32_t team_max(uint32_t x) const { return __reduce_max_sync(0xffffffffu, x); }
  template <class T>
  __device__ T sum(T x) const {
    for (int mask = kLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  }
};

// All lanes of a block on one row. Its rows are only moved and summed element by element: there is no sum over lanes.
struct BlockGroup {
  static constexpr int kTeamLanes = WarpGroup::kLanes;
  int64_t index, count;
  __device__ Range share(int64_t n) const { return {index, n, count}; }
  __device__ bool leader() const { return threadIdx.x == 0; }
  __device__ int lane() const { return int(threadIdx.x); }
  __device__ int lanes() const { return int(blockDim.x); }
  __device__ int team() const { return lane() / kTeamLanes; }
  __device__ int teams() const { return lanes() / kTeamLanes; }
  __device__ int team_lane() const { return lane() % kTeamLanes; }
  __device__ uint32_t team_max(uint32_t x) const { return __reduce_max_sync(0xffffffffu, x); }
};

// How the peers of this build are reached; part of every launch's arguments.
struct MappedLinks {
  static constexpr bool kWarpsOnly = false;
  uint64_t unused;
  __device__ MappedLink link() const { return {}; }
  template <class Group>
  __device__ MappedLink link(const Group&) const {
    return {};
  }
};

template <class Links>
struct CudaMachine {
  static constexpr bool kWarpsOnly = Links::kWarpsOnly;
  static constexpr unsigned kNapNs = 32;
  const Links& links;
  BlockShared& shared_;
  int32_t* scratch_;

  __device__ BlockCoop block() const { return {}; }
  __device__ BlockShared& shared() const { return shared_; }
  __device__ int32_t* scratch() const { return scratch_; }
  __device__ int num_blocks() const { return int(gridDim.x); }
  __device__ int block_index() const { return int(blockIdx.x); }
  __device__ int64_t clock_ns() const {
    int64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  __device__ void nap() const { __nanosleep(kNapNs); }
  __device__ WarpGroup warps(int first_block) const {
    const int each = int(blockDim.x) / WarpGroup::kLanes;
    return {int64_t{block_index() - first_block} * each + int(threadIdx.x) / WarpGroup::kLanes,
            int64_t{num_blocks() - first_block} * each};
  }
  __device__ BlockGroup blocks(int first_block) const {
    return {block_index() - first_block, num_blocks() - first_block};
  }
  __device__ auto link() const { return links.link(); }
  template <class Group>
  __device__ auto link(const Group& group) const {
    return links.link(group);
  }
};

}  // namespace moe_rt
