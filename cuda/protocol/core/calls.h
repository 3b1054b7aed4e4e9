// Conversions of an op's arguments, at the start of each op: expert ids for the routing roles, and the Call that the
// rank announces.
#pragma once

#include "args.h"
#include "plan.h"

namespace moe_rt {

MOE_RT_FN ExpertIds ids_of(const DispatchArgs& a) { return {a.topk_idx, a.idx_bytes == 4}; }

MOE_RT_FN Call call_of(const DispatchArgs& a, uint32_t tag) {
  return {.op = Op::kDispatch,
          .tag = tag,
          .num_tokens = int32_t(a.num_tokens),
          .max_tokens = int32_t(a.max_tokens),
          .capacity = int32_t(a.capacity),
          .row_format = uint32_t(a.scaled.row_format)};
}

MOE_RT_FN Call call_of(const CombineArgs& a, uint32_t tag, const RecvPlan& plan) {
  return {.op = a.op, .tag = tag, .handle_seq = plan.head->seq, .num_tokens = int32_t(a.num_tokens)};
}

MOE_RT_FN Call call_of(const CombineBackwardArgs& a, uint32_t tag, const RecvPlan& plan) {
  return {.op = Op::kCombineBackward, .tag = tag, .handle_seq = plan.head->seq, .num_tokens = int32_t(a.num_tokens)};
}

}  // namespace moe_rt
