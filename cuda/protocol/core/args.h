// What an op or an activation is given: the addresses of its tensors, the same for the CPU engine and for CUDA launches.
#pragma once

#include "status.h"

namespace moe_rt {

// Pointers are to contiguous tensors of the shapes in moe_rt/comm/ops.py; rows are of the payload's type, weights of the
// accumulator's. Python fills the fields by name: host/launch_bindings.cpp.

// What a dispatch has besides plain rows where rows come, or are delivered, as codes with scales.
struct ScaledArgs {
  int64_t row_format;               // what x and scales are, alike on every rank; zero if x is plain rows
  const void* scales;               // of x, where that is codes
  void* recv_scales;                // of recv_x
  int64_t code_bytes, scale_bytes;  // of a row of recv_x, and of recv_scales
};

struct DispatchArgs {
  const void* x;  // rows, or codes that come with scales
  const void* topk_idx;
  int64_t idx_bytes;  // of an entry: 8, or 4
  const void* topk_weights;
  int64_t num_tokens;
  int64_t max_tokens, capacity;  // the most tokens of any rank; rows of recv_x and recv_weights
  void* recv_x;
  void* recv_weights;
  int32_t* offs;
  int32_t* recv_plan;
  int32_t* send_plan;
  ScaledArgs scaled{};  // all zero where x and recv_x are plain rows
};

struct CombineArgs {
  Op op;  // kCombine or kDispatchBackward
  const void* y;
  const void* recv_weights;       // combine: factors, or nullptr where rows are of tokens; dispatch backward: nullptr
  const void* grad_recv_weights;  // dispatch backward: scalars sent home; combine: nullptr
  int64_t num_rows, capacity;     // of y; of recv_weights or grad_recv_weights
  int32_t* recv_plan;
  const int32_t* send_plan;
  int64_t num_tokens;
  void* out;
  void* grad_topk_weights;  // dispatch backward only
};

// Where rows are of tokens there are no factors: y and both kinds of weights are nullptr.
struct CombineBackwardArgs {
  const void* grad_out;
  int64_t num_tokens;
  const void* y;
  const void* recv_weights;
  int64_t num_rows, capacity;  // of y and grad_y; of recv_weights and grad_recv_weights
  int32_t* recv_plan;
  void* grad_y;
  void* grad_recv_weights;
};

// A rank that ends: why, for its peers' poison words.
struct EndArgs {
  int64_t code;
};

// Of the launches of device/activation.h.
struct SwigluArgs {
  const void* gate_up;
  const int32_t* offs;
  int64_t num_local, num_rows, intermediate;
  void* out;
};

struct SwigluBackwardArgs {
  const void* grad;
  const void* gate_up;
  const int32_t* offs;
  int64_t num_local, num_rows, intermediate;
  void* grad_gate_up;
};

// The host makes these bytes and kernels read them: two compilers must lay them out alike.
static_assert(sizeof(DispatchArgs) == 136 && sizeof(CombineArgs) == 88 && sizeof(CombineBackwardArgs) == 72 &&
                  sizeof(SwigluArgs) == 48 && sizeof(SwigluBackwardArgs) == 56,
              "the host's layout");

}  // namespace moe_rt
