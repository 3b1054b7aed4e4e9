// Rows of two tensors, codes and their scales, which dispatch moves as bytes: only experts interpret them.
#pragma once

#include <cstring>

#include "rows.h"

namespace moe_rt::rows {

// Interface of HostRows for dispatch: `x` and `to` of its calls are codes, and rows of the same index here are their
// scales.
struct HostScaledRows {
  const Table* table;
  RowParts parts;
  const char* scales;
  char* recv_scales;
  bool stream;

  int64_t encoded_row_bytes() const { return parts.bytes(); }
  void publish(char* dst, const char* x, int64_t row) const {
    char* const scales_dst = dst + parts.scales_at();
    table->copy(&dst, 1, x + row * parts.code_bytes, parts.code_bytes, stream);
    table->copy(&scales_dst, 1, scales + row * parts.scale_bytes, parts.scale_bytes, stream);
  }
  void clear(char* to, int64_t row) const {
    std::memset(to + row * parts.code_bytes, 0, parts.code_bytes);
    std::memset(recv_scales + row * parts.scale_bytes, 0, parts.scale_bytes);
  }
  void spread(char* to, const int32_t* rows, int n, const char* src) const {
    const Places codes_to(to, parts.code_bytes, rows, n), scales_to(recv_scales, parts.scale_bytes, rows, n);
    table->copy(codes_to.dsts, n, src, parts.code_bytes, stream);
    table->copy(scales_to.dsts, n, src + parts.scales_at(), parts.scale_bytes, stream);
  }
};

}  // namespace moe_rt::rows
