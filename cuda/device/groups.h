// Choice of the lanes that take a row together, by the number of rows.
#pragma once

#include "../protocol/core/platform.h"

namespace moe_rt {

// Number of a block's warps that take a row together: the maximum at which no row waits for another, or one.
MOE_RT_FN int warps_together(int64_t num_rows, int64_t num_blocks, int warps) {
  int together = warps;
  while (together > 1 && num_rows > num_blocks * (warps / together)) together = together % 2 == 0 ? together / 2 : 1;
  return together;
}

// Runs fn on groups of lanes for `num_rows` rows: all warps have work for any number, and one more row adds little
// time.
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
