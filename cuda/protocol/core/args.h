// Arguments of ops and activations: the addresses of their tensors, in one layout for the CPU engine and CUDA launches.
// Every op starts from one of these structs.
#pragma once

#include "status.h"

namespace moe_rt {

// Each list of fields makes a struct, and the constructor by which Python fills it by name (python/arguments.h).
// Pointers are to contiguous tensors of the shapes in moe_rt/ops/table.py. Rows have the payload's type, weights the
// accumulator's.

// Additional arguments of a dispatch whose rows arrive, or are delivered, as codes with scales. `row_format` encodes the
// dtypes and sizes of x and scales, identical on every rank.
#define MOE_RT_SCALED_ARGS(FIELD)                              \
  FIELD(int64_t, row_format)  /* 0 if x is plain rows */       \
  FIELD(const void*, scales)  /* scales of x, if x is codes */ \
  FIELD(void*, recv_scales)   /* scales of recv_x */           \
  FIELD(int64_t, code_bytes)  /* bytes of a row of recv_x */   \
  FIELD(int64_t, scale_bytes) /* bytes of a row of recv_scales */

#define MOE_RT_DISPATCH_ARGS(FIELD)                                                      \
  FIELD(const void*, x)            /* rows, or codes whose scales are in `scaled` */     \
  FIELD(const void*, topk_idx)     /* [T][K] expert ids, -1 for none */                  \
  FIELD(int64_t, idx_bytes)        /* bytes of an entry: 8 or 4 */                       \
  FIELD(const void*, topk_weights) /* [T][K] */                                          \
  FIELD(int64_t, num_tokens)                                                             \
  FIELD(int64_t, max_tokens) /* bound on each rank's tokens */                           \
  FIELD(int64_t, capacity)   /* rows of recv_x and recv_weights */                       \
  FIELD(void*, recv_x)       /* [capacity][H] */                                         \
  FIELD(void*, recv_weights) /* [capacity], or [capacity][K] with RecvLayout::kTokens */ \
  FIELD(int32_t*, offs)      /* end row of each part of recv_x, see World::num_parts */  \
  FIELD(int32_t*, recv_plan) /* RecvPlan of the handle (plan.h) */                       \
  FIELD(int32_t*, send_plan) /* [T][K] of the handle (plan.h) */

// Combine, and dispatch backward, whose y is the gradient of recv_x.
#define MOE_RT_COMBINE_ARGS(FIELD)                                                                             \
  FIELD(Op, op)                         /* kCombine or kDispatchBackward */                                    \
  FIELD(const void*, y)                 /* rows in the order of recv_x */                                      \
  FIELD(const void*, recv_weights)      /* combine without RecvLayout::kTokens: factors; else nullptr */       \
  FIELD(const void*, grad_recv_weights) /* dispatch backward: scalars returned to the sources; else nullptr */ \
  FIELD(int64_t, num_rows)              /* rows of y */                                                        \
  FIELD(int64_t, capacity)              /* rows of recv_weights or grad_recv_weights */                        \
  FIELD(int32_t*, recv_plan)                                                                                   \
  FIELD(const int32_t*, send_plan)                                                                             \
  FIELD(int64_t, num_tokens)                                                                                   \
  FIELD(void*, out)               /* [T][H] */                                                                 \
  FIELD(void*, grad_topk_weights) /* [T][K], dispatch backward only */

// RecvLayout::kTokens has no factors: y and both kinds of weights are nullptr.
#define MOE_RT_COMBINE_BACKWARD_ARGS(FIELD)                                 \
  FIELD(const void*, grad_out) /* [T][H] */                                 \
  FIELD(int64_t, num_tokens)                                                \
  FIELD(const void*, y)                                                     \
  FIELD(const void*, recv_weights)                                          \
  FIELD(int64_t, num_rows) /* rows of y and grad_y */                       \
  FIELD(int64_t, capacity) /* rows of recv_weights and grad_recv_weights */ \
  FIELD(int32_t*, recv_plan)                                                \
  FIELD(void*, grad_y)                                                      \
  FIELD(void*, grad_recv_weights)

// A rank that leaves the group.
#define MOE_RT_END_ARGS(FIELD) FIELD(int64_t, code) /* for its peers' poison words */

// Arguments of the launches in gpu/activation.h.
#define MOE_RT_SWIGLU_ARGS(FIELD)                                       \
  FIELD(const void*, gate_up)  /* [num_rows][2 * intermediate] */       \
  FIELD(const int32_t*, offs)  /* [num_local] end row of each expert */ \
  FIELD(int64_t, num_local)    /* experts */                            \
  FIELD(int64_t, num_rows)     /* rows of the tensors */                \
  FIELD(int64_t, intermediate) /* columns of `out` */                   \
  FIELD(void*, out)

#define MOE_RT_SWIGLU_BACKWARD_ARGS(FIELD) \
  FIELD(const void*, grad)                 \
  FIELD(const void*, gate_up)              \
  FIELD(const int32_t*, offs)              \
  FIELD(int64_t, num_local)                \
  FIELD(int64_t, num_rows)                 \
  FIELD(int64_t, intermediate)             \
  FIELD(void*, grad_gate_up)

struct ScaledArgs {
  MOE_RT_SCALED_ARGS(MOE_RT_MEMBER)
};
struct DispatchArgs {
  MOE_RT_DISPATCH_ARGS(MOE_RT_MEMBER)
  ScaledArgs scaled{};  // all zero if x and recv_x are plain rows; Python sets it later
  // Rows from the first one of an expert to that of the next, and `offs` gets the number of each expert's rows; 0 if
  // experts follow each other. Python sets it later.
  int64_t expert_rows = 0;
};
struct CombineArgs {
  MOE_RT_COMBINE_ARGS(MOE_RT_MEMBER)
  // [T][K] factors that the source applies in place of recv_weights, with Sums::kInvariant; Python sets it later.
  const void* topk_weights = nullptr;
};
struct CombineBackwardArgs {
  MOE_RT_COMBINE_BACKWARD_ARGS(MOE_RT_MEMBER)
};
struct EndArgs {
  MOE_RT_END_ARGS(MOE_RT_MEMBER)
};
struct SwigluArgs {
  MOE_RT_SWIGLU_ARGS(MOE_RT_MEMBER)
};
struct SwigluBackwardArgs {
  MOE_RT_SWIGLU_BACKWARD_ARGS(MOE_RT_MEMBER)
};

// The host fills these bytes and kernels read them, so two compilers must agree on their layout: eight bytes a field.
#define MOE_RT_EIGHT_BYTES(type, name) +8
static_assert(sizeof(ScaledArgs) == 0 MOE_RT_SCALED_ARGS(MOE_RT_EIGHT_BYTES) &&
                  sizeof(DispatchArgs) == sizeof(ScaledArgs) + 8 MOE_RT_DISPATCH_ARGS(MOE_RT_EIGHT_BYTES) &&
                  sizeof(CombineArgs) == 8 MOE_RT_COMBINE_ARGS(MOE_RT_EIGHT_BYTES) &&
                  sizeof(CombineBackwardArgs) == 0 MOE_RT_COMBINE_BACKWARD_ARGS(MOE_RT_EIGHT_BYTES) &&
                  sizeof(SwigluArgs) == 0 MOE_RT_SWIGLU_ARGS(MOE_RT_EIGHT_BYTES) &&
                  sizeof(SwigluBackwardArgs) == 0 MOE_RT_SWIGLU_BACKWARD_ARGS(MOE_RT_EIGHT_BYTES),
              "the host's layout");

}  // namespace moe_rt
