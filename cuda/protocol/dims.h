// Sizes a role body is compiled for: read at run time, or constants that a just-in-time compiler has filled in.
#pragma once

#include "platform.h"

namespace moe_rt {

inline constexpr int kMaxTopk = 128;

struct RuntimeDims {
  static constexpr int kTopkBound = kMaxTopk;
  int hidden_, num_topk_;
  MOE_RT_FN int hidden() const { return hidden_; }
  MOE_RT_FN int num_topk() const { return num_topk_; }
};

template <int kHidden, int kTopk>
struct FixedDims {
  static_assert(kTopk > 0 && kTopk <= kMaxTopk, "num_topk outside [1, kMaxTopk]");
  static constexpr int kTopkBound = kTopk;
  MOE_RT_FN static constexpr int hidden() { return kHidden; }
  MOE_RT_FN static constexpr int num_topk() { return kTopk; }
};

}  // namespace moe_rt
