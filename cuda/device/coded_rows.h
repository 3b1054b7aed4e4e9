// Coding and decoding a row by a group of lanes: a team of lanes takes a block of 128 elements, a few for each lane.
//
// A team is a warp, whichever group it is part of, so that its lanes agree on a largest magnitude without a barrier.
#pragma once

#include "../protocol/core/codec.h"

namespace moe_rt {

// Codes value(i), i < hidden, into a coded row.
template <class Group, class Value>
MOE_RT_FN void encode_row(const Group& group, Codec codec, int hidden, char* dst, Value&& value) {
  constexpr int kEach = kCodecBlock / Group::kTeamLanes;
  auto* const codes = reinterpret_cast<uint8_t*>(dst);
  auto* const scales = reinterpret_cast<float*>(dst + codec_parts(hidden).scales_at());
  const int num_blocks = (hidden + kCodecBlock - 1) / kCodecBlock;
  for (int block = group.team(); block < num_blocks; block += group.teams()) {
    const int first = block * kCodecBlock + group.team_lane() * kEach;
    float values[kEach];
    uint32_t largest = 0;
    for (int i = 0; i < kEach; ++i) {
      values[i] = first + i < hidden ? value(first + i) : 0.0f;
      const uint32_t bits = magnitude_bits(values[i]);
      largest = bits > largest ? bits : largest;
    }
    const CodecScale s = codec_scale(codec, group.team_max(largest));
    for (int i = 0; i < kEach; ++i) {
      if (first + i < hidden) codes[first + i] = encode(codec, values[i], s.inverse);
    }
    if (group.team_lane() == 0) scales[block] = s.scale;
  }
}

// Calls use(i, decoded) for every i < hidden; decoded(row) is element i of a coded row.
template <class Group, class Use>
MOE_RT_FN void decode_row(const Group& group, Codec codec, int hidden, Use&& use) {
  for (int i = group.lane(); i < hidden; i += group.lanes()) {
    use(i, [&](const char* row) {
      const float scale = reinterpret_cast<const float*>(row + codec_parts(hidden).scales_at())[i / kCodecBlock];
      return decode(codec, reinterpret_cast<const uint8_t*>(row)[i], scale);
    });
  }
}

}  // namespace moe_rt
