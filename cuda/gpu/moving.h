// Moves of a row by a group of lanes: neighbouring vectors on neighbouring lanes, with several vectors in flight.
#pragma once

#include "../protocol/core/tuning.h"

namespace moe_rt {

// Reads the n vectors of a row once; sink(to_row) may call to_row(dst) for each destination.
template <class Vector, class Group, class Sink>
MOE_RT_FN void move_vectors(const Group& group, int n, const char* src, Sink&& sink) {
  const int step = group.lanes() * tuning::kVectorsAtOnce;
  for (int first = group.lane(); first < n; first += step) {
    const auto at = [&](int i) { return first + i * group.lanes(); };
    Vector batch[tuning::kVectorsAtOnce];
    for (int i = 0; i < tuning::kVectorsAtOnce; ++i) {
      if (at(i) < n) batch[i] = reinterpret_cast<const Vector*>(src)[at(i)];
    }
    sink([&](char* dst) {
      for (int i = 0; i < tuning::kVectorsAtOnce; ++i) {
        if (at(i) < n) reinterpret_cast<Vector*>(dst)[at(i)] = batch[i];
      }
    });
  }
}

// Moves raw rows by lanes, through their registers. ring.h has the alternative.
struct ByLanes {
  template <class Vector, class Group, class Sink>
  MOE_RT_FN void move(const Group& group, int n, const char* src, Sink&& sink) const {
    move_vectors<Vector>(group, n, src, sink);
  }
};

}  // namespace moe_rt
