// A group as described by an input: sizes, placement, and segments that are heap allocations of exactly the protocol's
// size, so that a sanitizer reports the first byte out of bounds.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../device/emulated_engine.h"
#include "bytes.h"

namespace moe_rt {

#if defined(MOE_RT_EMULATED_GPU)
inline constexpr int kHidden = 8, kTopk = 3;  // constants there, as in just-in-time compiled code
using Rank = emulation::Engine<kHidden, kTopk>;
inline constexpr bool kAnyShape = false;
#else
inline constexpr int kHidden = 0, kTopk = 0;
using Rank = Engine;
inline constexpr bool kAnyShape = true;
#endif

inline constexpr uint64_t kConfig = 7, kPlanMark = 8;

struct Group {
  Shape shape;
  rows::Elem elem = rows::Elem::kFloat32;
  int me;
  Codec dispatch_codec = Codec::kRaw, combine_codec = Codec::kRaw;
  bool drop = false;
  bool scaled;  // rows have scales
  std::vector<int32_t> expert_rank;
  PlacementTables placement;
  std::vector<int64_t> capacity;
  std::vector<std::unique_ptr<char, void (*)(void*)>> segments;
  std::vector<char*> base;

  Group(fuzz::Bytes& in, bool with_scales) : scaled(with_scales) {
    const int num_ranks = in.between(1, 4), num_experts = in.between(num_ranks + 2, num_ranks + 6);
    shape = {num_ranks, num_experts, in.between(1, 8), kHidden, kTopk, 4, 4};
    me = in.between(0, num_ranks - 1);
    if constexpr (kAnyShape) {
      shape.hidden = in.between(1, 20);
      shape.num_topk = in.between(1, 3);
      if (in.between(0, 3) == 0) {
        elem = rows::Elem::kFloat64, shape.elem_bytes = shape.acc_bytes = 8;
      } else {
        dispatch_codec = Codec(in.between(0, 2)), combine_codec = Codec(in.between(0, 2));
      }
      const int choices = in.between(0, 3);
      drop = choices % 2 == 0;
      shape.recv_layout = choices / 2 == 0 ? RecvLayout::kExperts : RecvLayout::kTokens;
    }
    // Draw nothing new from here on: kept inputs must keep their meaning.
    if (!shape.by_token() && num_experts % 3 == 0) shape.sums = Sums::kInvariant;
#if defined(MOE_RT_EMULATED_GPU)
    if (num_experts % 2 == 0) shape.num_pushed_tokens = shape.num_max_tokens;
    if (num_experts % 4 == 0) shape.num_pushed_rows = shape.num_max_tokens;
#endif
    for (int e = 0; e < num_experts; ++e) expert_rank.push_back(e < num_ranks ? e : in.between(0, num_ranks - 1));
    placement = PlacementTables::make(expert_rank, num_ranks);
    const int64_t bytes = Layout::make(shape).bytes;
    for (int r = 0; r < num_ranks; ++r) {
      const int copies = shape.by_token() ? 1 : std::min(shape.num_topk, num_local(r));
      const int64_t worst = int64_t{num_ranks} * shape.num_max_tokens * copies;
      capacity.push_back(std::max<int64_t>(1, worst * in.between(1, 4) / 4));
      segments.emplace_back(static_cast<char*>(std::aligned_alloc(kPage, bytes)), std::free);
      std::fill_n(segments.back().get(), bytes, 0);
      base.push_back(segments.back().get());
    }
  }

  int num_local(int rank) const { return placement.rank_first[rank + 1] - placement.rank_first[rank]; }
  World world(int rank) {
    return {.shape = shape,
            .layout = Layout::make(shape),
            .placement = placement.view(),
            .base = base.data(),
            .mirror = nullptr,
            .rank = rank,
            .config = kConfig,
            .plan_mark = kPlanMark};
  }
  EngineConfig config() const {
    std::vector<uint64_t> addresses;
    for (char* const segment : base) addresses.push_back(reinterpret_cast<uint64_t>(segment));
    const double at_once = 0;  // peers will announce nothing more
    return {.shape = shape,
            .elem = elem,
            .rank = me,
            .config_hash = kConfig,
            .expert_rank = expert_rank,
            .segments = addresses,
            .watches = {},
            .timeout_s = at_once,
            .dispatch_codec = dispatch_codec,
            .combine_codec = combine_codec,
            .drop_overflow = drop,
            .num_lanes = 1,
            .isa = "portable"};
  }
};

}  // namespace moe_rt
