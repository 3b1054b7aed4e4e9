// Arguments of ops and activations: the addresses of their tensors, in one layout for the CPU engine and CUDA launches.
// Every op starts from one of these structs.
#pragma once

#include "status.h"

namespace moe_rt {

// Pointers are to contiguous tensors of the shapes in moe_rt/ops/table.py. Rows have the payload's type, weights the
// accumulator's. Python fills the fields by name: python/launch_bindings.cpp.

// Additional arguments of a dispatch whose rows arrive, or are delivered, as codes with scales.
struct ScaledArgs {
  int64_t row_format;               // dtypes and sizes of x and scales, identical on every rank; 0 if x is plain rows
  const void* scales;               // scales of x, if x is codes
  void* recv_scales;                // scales of recv_x
  int64_t code_bytes, scale_bytes;  // bytes of a row of recv_x, and of recv_scales
};

struct DispatchArgs {
  const void* x;             // rows, or codes whose scales are in `scaled`
  const void* topk_idx;      // [T][K] expert ids, -1 for none
  int64_t idx_bytes;         // bytes of an entry: 8 or 4
  const void* topk_weights;  // [T][K]
  int64_t num_tokens;
  int64_t max_tokens, capacity;  // bound on each rank's tokens; rows of recv_x and recv_weights
  void* recv_x;                  // [capacity][H]
  void* recv_weights;            // [capacity], or [capacity][K] with RecvLayout::kTokens
  int32_t* offs;                 // end row of each part of recv_x, see World::num_parts
  int32_t* recv_plan;            // RecvPlan of the handle (plan.h)
  int32_t* send_plan;            // [T][K] of the handle (plan.h)
  ScaledArgs scaled{};           // all zero if x and recv_x are plain rows
};

struct CombineArgs {
  Op op;                          // kCombine or kDispatchBackward
  const void* y;                  // rows in the order of recv_x; dispatch backward: their gradient
  const void* recv_weights;       // combine: factors, or nullptr with RecvLayout::kTokens; dispatch backward: nullptr
  const void* grad_recv_weights;  // dispatch backward: scalars returned to the sources; combine: nullptr
  int64_t num_rows, capacity;     // rows of y; rows of recv_weights or grad_recv_weights
  int32_t* recv_plan;
  const int32_t* send_plan;
  int64_t num_tokens;
  void* out;                // [T][H]
  void* grad_topk_weights;  // [T][K], dispatch backward only
};

// RecvLayout::kTokens has no factors: y and both kinds of weights are nullptr.
struct CombineBackwardArgs {
  const void* grad_out;  // [T][H]
  int64_t num_tokens;
  const void* y;
  const void* recv_weights;
  int64_t num_rows, capacity;  // rows of y and grad_y; rows of recv_weights and grad_recv_weights
  int32_t* recv_plan;
  void* grad_y;
  void* grad_recv_weights;
};

// A rank that leaves the group: the code for its peers' poison words.
struct EndArgs {
  int64_t code;
};

// Arguments of the launches in gpu/activation.h.
struct SwigluArgs {
  const void* gate_up;                        // [num_rows][2 * intermediate]
  const int32_t* offs;                        // [num_local] end row of each expert
  int64_t num_local, num_rows, intermediate;  // experts; rows of the tensors; columns of `out`
  void* out;
};

struct SwigluBackwardArgs {
  const void* grad;
  const void* gate_up;
  const int32_t* offs;
  int64_t num_local, num_rows, intermediate;
  void* grad_gate_up;
};

// The host fills these bytes and kernels read them, so two compilers must agree on their layout.
static_assert(sizeof(DispatchArgs) == 136 && sizeof(CombineArgs) == 88 && sizeof(CombineBackwardArgs) == 72 &&
                  sizeof(SwigluArgs) == 48 && sizeof(SwigluBackwardArgs) == 56,
              "the host's layout");

}  // namespace moe_rt
