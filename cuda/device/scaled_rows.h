// Rows of two tensors, codes and their scales, which dispatch moves as bytes: what they say is for experts to read.
//
// How long they are is known when a call is made, so each part goes in the widest of three vectors that divides it:
// its rows then begin at multiples of that, in tensors and in windows.
#pragma once

#include "../protocol/core/codec.h"
#include "../protocol/core/dims.h"
#include "moving.h"

namespace moe_rt {

struct alignas(16) FourWords {
  uint32_t words[4];
};

// fn(vector, n): an example of the vector of which n are so many bytes.
template <class Fn>
MOE_RT_FN void with_vectors(int64_t bytes, Fn&& fn) {
  if (bytes % 16 == 0) {
    fn(FourWords{}, int(bytes / 16));
  } else if (bytes % 4 == 0) {
    fn(uint32_t{}, int(bytes / 4));
  } else {
    fn(char{}, int(bytes));
  }
}

// As DeviceRows for dispatch: `x` and `to` of its calls are codes, and the rows of the same number here are their scales.
template <class Dims, class Group>
struct DeviceScaledRows {
  Group group;
  RowParts parts;
  const char* scales;
  char* recv_scales;

  MOE_RT_FN int64_t encoded_row_bytes() const { return parts.bytes(); }
  MOE_RT_FN void publish(char* dst, const char* x, int64_t row) const {
    const int32_t first = 0;
    spread_part(dst, &first, 1, x + row * parts.code_bytes, parts.code_bytes);
    spread_part(dst + parts.scales_at(), &first, 1, scales + row * parts.scale_bytes, parts.scale_bytes);
  }
  MOE_RT_FN void clear(char* to, int64_t row) const {
    clear_part(to + row * parts.code_bytes, parts.code_bytes);
    clear_part(recv_scales + row * parts.scale_bytes, parts.scale_bytes);
  }
  MOE_RT_FN void spread(char* to, const int32_t* rows, int n, const char* src) const {
    spread_part(to, rows, n, src, parts.code_bytes);
    spread_part(recv_scales, rows, n, src + parts.scales_at(), parts.scale_bytes);
  }

 private:
  MOE_RT_FN void spread_part(char* to, const int32_t* rows, int n, const char* src, int64_t bytes) const {
    with_vectors(bytes, [&](auto vector, int count) {
      move_vectors<decltype(vector)>(group, count, src, [&](auto&& to_row) {
        for_topk<Dims>(n, [&](int i) {
          if (rows[i] >= 0) to_row(to + rows[i] * bytes);
        });
      });
    });
  }
  MOE_RT_FN void clear_part(char* dst, int64_t bytes) const {
    with_vectors(bytes, [&](auto vector, int count) {
      for (int at = group.lane(); at < count; at += group.lanes())
        reinterpret_cast<decltype(vector)*>(dst)[at] = vector;
    });
  }
};

}  // namespace moe_rt
