// Which lanes of a launch take a row together, by how many rows there are.
#pragma once

#include "../protocol/core/platform.h"

namespace moe_rt {

// How many of a block's warps take a row together: as many as leave no row waiting for another, or one.
MOE_RT_FN int warps_together(int64_t num_rows, int64_t num_blocks, int warps) {
  int together = warps;
  while (together > 1 && num_rows > num_blocks * (warps / together)) together = together % 2 == 0 ? together / 2 : 1;
  return together;
}

// Groups of lanes for so many rows: whatever their number is, all warps have work, and one row more takes little longer.
template <class Machine, class Fn>
MOE_RT_FN void with_groups(const Machine& m, int first_block, int64_t num_rows, Fn&& fn) {
  if constexpr (Machine::kWarpsOnly) {
    fn(m.warps(first_block));
  } else {
    const int warps = m.block().size() / decltype(m.warps(first_block))::kTeamLanes;
    fn(m.warps(first_block, warps_together(num_rows, m.num_blocks() - first_block, warps)));
  }
}

}  // namespace moe_rt
