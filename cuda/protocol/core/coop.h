// Cooperation of the lanes that run a role together: the interface that role functions use, and a group of one lane.
//
// A coop has rank(), size(), sync() and the two ways of sharing work below. Role functions use nothing else, so the
// same text runs on one thread (Solo), on a team of host threads (cpu/team.h) and on a CUDA block (gpu/machine.h).
//   chunk(n)  contiguous, in lane order: for work whose result depends on order (stable lists)
//   share(n)  any partition that suits the hardware: for independent rows
// If several lanes work on one share together (a CUDA warp), leader() is true for the lane that writes scalars.
#pragma once

#include "platform.h"

namespace moe_rt {

struct Range {
  int64_t begin, end, step;
};

// Contiguous and balanced: the first n % size lanes get one item more.
MOE_RT_FN Range contiguous_chunk(int64_t n, int64_t rank, int64_t size) {
  const int64_t each = n / size, extra = n % size;
  const int64_t begin = rank * each + min_of(rank, extra);
  return {begin, begin + each + (rank < extra ? 1 : 0), 1};
}

struct Solo {
  MOE_RT_FN static constexpr int rank() { return 0; }
  MOE_RT_FN static constexpr int size() { return 1; }
  MOE_RT_FN static constexpr bool leader() { return true; }
  MOE_RT_FN void sync() const {}
  MOE_RT_FN Range chunk(int64_t n) const { return {0, n, 1}; }
  MOE_RT_FN Range share(int64_t n) const { return {0, n, 1}; }
};

// Assigns neighbouring items to neighbouring lanes: for short arrays that one access should cover.
template <class Coop>
MOE_RT_FN Range strided(const Coop& coop, int64_t n) {
  return {coop.rank(), n, coop.size()};
}

// Returns fn(i, writes) in values[i] for i in [0, n), n <= kBound; n is the same on all lanes that share an item. Lanes of
// a GPU divide the calls (gpu/machine.h), so that their loads overlap. `writes` is true for one call of each i.
template <int kBound, class Coop, class Fn>
MOE_RT_FN void collect(const Coop& coop, int n, int32_t* values, Fn&& fn) {
  if constexpr (requires { coop.template divide<kBound>(n, values, fn); }) {
    coop.template divide<kBound>(n, values, fn);
  } else {
    for (int i = 0; i < n; ++i) values[i] = fn(i, coop.leader());
  }
}

// Exclusive prefix sums, and their total. `sums` is one of the two arrays passed to exclusive_scan.
struct Scan {
  int32_t* sums;
  int32_t total;
};

// Exclusive prefix sums of data[0, n) by doubling steps (Hillis and Steele 1986), or in place if the coop has one lane.
// `spare` holds n entries. Every lane calls it after a sync and may read the result immediately.
template <class Coop>
MOE_RT_FN Scan exclusive_scan(const Coop& coop, int32_t* data, int32_t* spare, int32_t n) {
  if (coop.size() == 1) {
    int32_t total = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t mine = data[i];
      data[i] = total;
      total += mine;
    }
    return {data, total};
  }
  int32_t *from = data, *to = spare;
  for (int32_t distance = 1; distance < n; distance *= 2) {
    for (int32_t i = coop.rank(); i < n; i += coop.size()) to[i] = from[i] + (i < distance ? 0 : from[i - distance]);
    coop.sync();
    int32_t* const swapped = from;
    from = to;
    to = swapped;
  }
  for (int32_t i = coop.rank(); i < n; i += coop.size()) to[i] = i == 0 ? 0 : from[i - 1];
  const int32_t total = n == 0 ? 0 : from[n - 1];
  coop.sync();
  return {to, total};
}

}  // namespace moe_rt
