// Rows of two tensors, codes and their scales, which dispatch moves as bytes: only experts interpret them.
//
// Their sizes are known when a call is made, so each part goes in the widest of three vectors that divides it: its rows
// then begin at multiples of that vector, in tensors and in windows.
#pragma once

#include "../protocol/core/codec.h"
#include "../protocol/core/dims.h"
#include "moving.h"

namespace moe_rt {

struct alignas(16) FourWords {
  uint32_t words[4];
};

// Calls fn(vector, n) with a value of the vector type of which n make up `bytes` bytes.
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

// Interface of DeviceRows for dispatch: `x` and `to` of its calls are codes, and rows of the same index here are their
// scales.
template <class Dims, class Group>
struct DeviceScaledRows {
  Group group;
  RowParts parts;
  const char* scales;
  char* recv_scales;

  MOE_RT_FN int64_t tensor_row_bytes() const { return parts.code_bytes; }
  MOE_RT_FN int64_t encoded_row_bytes() const { return parts.bytes(); }
  MOE_RT_FN void publish(char* dst, const char* x, int64_t row) const {
    publish_to(x + row * parts.code_bytes, row, [&](auto&& put) { put(dst); });
  }
  // Writes the codes at src, and the scales of that row, to each place that each_place passes to its argument.
  template <class EachPlace>
  MOE_RT_FN void publish_to(const char* src, int64_t row, EachPlace&& each_place) const {
    move_part(src, parts.code_bytes, each_place);
    move_part(scales + row * parts.scale_bytes, parts.scale_bytes,
              [&](auto&& put) { each_place([&](char* dst) { put(dst + parts.scales_at()); }); });
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
  template <class EachPlace>
  MOE_RT_FN void move_part(const char* src, int64_t bytes, EachPlace&& each_place) const {
    with_vectors(bytes, [&](auto vector, int count) { move_vectors<decltype(vector)>(group, count, src, each_place); });
  }
  MOE_RT_FN void spread_part(char* to, const int32_t* rows, int n, const char* src, int64_t bytes) const {
    move_part(src, bytes, [&](auto&& put) {
      for_topk<Dims>(n, [&](int i) {
        if (rows[i] >= 0) put(to + rows[i] * bytes);
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
