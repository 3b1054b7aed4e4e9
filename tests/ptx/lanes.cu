// Runs what lanes of a block do together (gpu/machine.h), for a test that compares it with plain sums and loops.
#include "machine.h"

// Replaces values[0, n) by their exclusive prefix sums; values[n] becomes their total. `spare` holds n values.
extern "C" __global__ void __launch_bounds__(MOE_RT_THREADS) scan(int* values, int* spare, int n) {
  const moe_rt::Scan found = exclusive_scan(moe_rt::BlockCoop{}, values, spare, n);
  for (int i = int(threadIdx.x); found.sums != values && i < n; i += int(blockDim.x)) values[i] = found.sums[i];
  if (threadIdx.x == 0) values[n] = found.total;
}

constexpr int kBound = 40;

// Each lane collects n values for its group of `together` warps, and counts in `writes` how often each may be written.
extern "C" __global__ void __launch_bounds__(MOE_RT_THREADS)
    collect_values(int* values, int* writes, int n, int together) {
  const int lane = int(threadIdx.x), lanes = together * 32;
  int own[kBound] = {};
  const auto value = [&](int i, bool may_write) {
    if (may_write) moe_rt::fetch_add_relaxed(writes[lane / lanes * kBound + i], 1);
    return 100 * (lane / lanes) + i;
  };
  moe_rt::collect<kBound>(moe_rt::WarpsGroup{0, 1, lane % lanes, lanes}, n, own, value);
  for (int i = 0; i < n; ++i) values[lane * kBound + i] = own[i];
}
