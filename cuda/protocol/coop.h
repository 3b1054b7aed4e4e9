// The group of lanes that runs a role together: what a role function may ask of it, and the group of one.
//
// A coop has rank(), size(), sync() and the two ways of sharing work below. Role functions use nothing else, so the
// same text runs on one thread (Solo), on a team of host threads (host/team.h) and on a CUDA block.
//   chunk(n)  contiguous, in lane order: for work whose result depends on order (stable lists)
//   share(n)  any partition that suits the hardware: for independent rows
#pragma once

#include "platform.h"

namespace moe_rt {

struct Range {
  int64_t begin, end, step;
};

// Contiguous and balanced: the first n % size lanes get one item more.
MOE_RT_FN Range contiguous_chunk(int64_t n, int64_t rank, int64_t size) {
  const int64_t each = n / size, extra = n % size;
  const int64_t begin = rank * each + smaller(rank, extra);
  return {begin, begin + each + (rank < extra ? 1 : 0), 1};
}

struct Solo {
  MOE_RT_FN int rank() const { return 0; }
  MOE_RT_FN int size() const { return 1; }
  MOE_RT_FN void sync() const {}
  MOE_RT_FN Range chunk(int64_t n) const { return {0, n, 1}; }
  MOE_RT_FN Range share(int64_t n) const { return {0, n, 1}; }
};

}  // namespace moe_rt
