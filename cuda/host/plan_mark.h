// What tells the plans of one engine from those of all others, of other processes too, and from memory that is no plan.
#pragma once

#include <cstdint>
#include <random>

namespace moe_rt {

inline uint64_t new_plan_mark() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace moe_rt
