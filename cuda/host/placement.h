// Tables of a placement, computed from the rank of each expert, identical for the CPU engine and for CUDA ranks.
#pragma once

#include <vector>

#include "../protocol/core/layout.h"

namespace moe_rt {

struct PlacementTables {
  std::vector<int32_t> position, owner, rank_first, entries;

  static PlacementTables make(const std::vector<int32_t>& expert_rank, int num_ranks) {
    PlacementTables t;
    const int num_experts = static_cast<int>(expert_rank.size());
    for (int r = 0; r < num_ranks; ++r) {
      t.rank_first.push_back(static_cast<int32_t>(t.owner.size()));
      for (int e = 0; e < num_experts; ++e) {
        if (expert_rank[e] == r) t.owner.push_back(r);
      }
    }
    t.rank_first.push_back(static_cast<int32_t>(t.owner.size()));
    std::vector<int32_t> next(t.rank_first.begin(), t.rank_first.end() - 1);
    for (int e = 0; e < num_experts; ++e) t.position.push_back(next[expert_rank[e]]++);
    for (const int32_t place : t.position) t.entries.push_back(int32_t(uint32_t(t.owner[place]) << 16 | place));
    return t;
  }
  Placement view() const { return {position.data(), owner.data(), rank_first.data(), entries.data()}; }
};

}  // namespace moe_rt
