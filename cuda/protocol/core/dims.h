// Sizes that a role body is compiled for: values read at run time, or constants filled in by a just-in-time compiler.
// Every role takes them as its Dims parameter.
#pragma once

#include "codec.h"
#include "status.h"

namespace moe_rt {

inline constexpr int kMaxTopk = 128;

// Order of the sums of combine-type ops. Values are those of moe_rt/config/options.py.
//   kRanked     each rank sums a token's rows and returns one partial; the source adds partials in rank order
//   kInvariant  every row returns by itself; the source adds them in the order of the token's top-k entries
enum class Sums : int32_t { kRanked = 0, kInvariant = 1 };

// Codec of each op's rows, from the two that users choose for dispatch and combine. Gradients travel raw.
MOE_RT_FN constexpr Codec codec_of(Op op, Codec dispatch, Codec combine) {
  switch (op) {
    case Op::kDispatch:
      return dispatch;
    case Op::kCombine:
      return combine;
    default:
      return Codec::kRaw;
  }
}

struct RuntimeDims {
  static constexpr int kTopkBound = kMaxTopk;
  static constexpr bool kUnrolled = false;
  int hidden_, num_topk_;
  Codec dispatch_codec_ = Codec::kRaw, combine_codec_ = Codec::kRaw;
  Sums sums_ = Sums::kRanked;
  MOE_RT_FN int hidden() const { return hidden_; }
  MOE_RT_FN int num_topk() const { return num_topk_; }
  MOE_RT_FN Codec codec(Op op) const { return codec_of(op, dispatch_codec_, combine_codec_); }
  MOE_RT_FN Sums sums() const { return sums_; }
};

template <int kHidden, int kTopk, Codec kDispatch = Codec::kRaw, Codec kCombine = Codec::kRaw,
          Sums kSums = Sums::kRanked>
struct FixedDims {
  static_assert(kTopk > 0 && kTopk <= kMaxTopk, "num_topk outside [1, kMaxTopk]");
  static constexpr int kTopkBound = kTopk;
  static constexpr bool kUnrolled = kTopk <= 16;
  MOE_RT_FN static constexpr int hidden() { return kHidden; }
  MOE_RT_FN static constexpr int num_topk() { return kTopk; }
  MOE_RT_FN static constexpr Codec codec(Op op) { return codec_of(op, kDispatch, kCombine); }
  MOE_RT_FN static constexpr Sums sums() { return kSums; }
};

// Calls fn(i) for i in [0, kCount), unrolled: arrays indexed by i then stay in registers; a GPU keeps them in memory
// otherwise.
template <int kCount, int kStep = 1, class Fn>
MOE_RT_FN void unrolled(Fn&& fn) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < kCount; i += kStep) fn(i);
}

// Calls fn(i) for every kStep-th i in [0, n), n <= num_topk; unrolled if num_topk is a small constant.
template <class Dims, int kStep = 1, class Fn>
MOE_RT_FN void for_topk(int n, Fn&& fn) {
  if constexpr (Dims::kUnrolled) {
    unrolled<Dims::kTopkBound, kStep>([&](int i) {
      if (i < n) fn(i);
    });
  } else {
    for (int i = 0; i < n; i += kStep) fn(i);
  }
}

}  // namespace moe_rt
