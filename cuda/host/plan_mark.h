// Mark that distinguishes one engine's plans from those of all other engines, also in other processes, and from memory
// that is no plan.
#pragma once

#include <cstdint>
#include <random>

namespace moe_rt {

inline uint64_t new_plan_mark() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace moe_rt
