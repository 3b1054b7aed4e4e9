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
  // Sum over this lane and all lanes before it.
  __device__ static int32_t sum_up_to(int32_t x) {
    for (int distance = 1; distance < kTeamLanes; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, x, distance);
      if (team_lane() >= distance) x += other;
    }
    return x;
  }
  __device__ static void meet_warp() { __syncwarp(); }
  // The first lane's value.
  __device__ static int32_t same(int32_t x) { return __shfl_sync(~0u, x, 0); }
  // See collect (core/coop.h): every lane of a warp calls fn for another i, and `writes` in one warp.
  template <int kBound, class Fn>
  __device__ static void divide_in_warp(int n, int32_t* values, bool writes, Fn&& fn) {
    unrolled<kBound, kTeamLanes>([&](int first) {
      const int i = first + team_lane();
      const int32_t mine = i < n ? fn(i, writes) : 0;
      unrolled<kTeamLanes>([&](int lane) {
        if (first + lane < kBound) values[first + lane] = __shfl_sync(~0u, mine, lane);
      });
    });
  }
};

// Exclusive prefix sums of data[0, n) in place, by shuffles; `spare` holds n entries.
__device__ inline Scan exclusive_scan(const BlockCoop& coop, int32_t* data, int32_t* spare, int32_t n) {
  constexpr int kLanes = WarpLanes::kTeamLanes;
  const int lane = WarpLanes::team_lane(), warp = coop.rank() / kLanes;
  const int32_t each = (n + coop.size() - 1) / coop.size(), per_warp = each * kLanes;
  const int32_t num_warps = n == 0 ? 0 : (n + per_warp - 1) / per_warp, first = coop.rank() * each;
  int32_t sum = 0;
  for (int32_t i = first; i < first + each && i < n; ++i) sum += data[i];
  const int32_t before = WarpLanes::sum_up_to(sum) - sum;
  if (warp < num_warps && lane == kLanes - 1) spare[warp] = before + sum;
  coop.sync();
  const int32_t sums = WarpLanes::sum_up_to(lane < num_warps ? spare[lane] : 0);
  const int32_t of_warps = __shfl_sync(~0u, sums, warp == 0 ? 0 : warp - 1), total = __shfl_sync(~0u, sums, kLanes - 1);
  int32_t start = before + (warp == 0 ? 0 : of_warps);
  for (int32_t i = first; i < first + each && i < n; ++i) {
    const int32_t mine = data[i];
    data[i] = start;
    start += mine;
  }
  coop.sync();
  return {data, total};
}

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
  template <int kBound, class Fn>
  __device__ void divide(int n, int32_t* values, Fn&& fn) const {
    divide_in_warp<kBound>(n, values, true, fn);
  }
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
  template <int kBound, class Fn>
  __device__ void divide(int n, int32_t* values, Fn&& fn) const {
    divide_in_warp<kBound>(n, values, team() == 0, fn);
  }
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
