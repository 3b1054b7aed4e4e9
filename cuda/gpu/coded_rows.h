// Encoding and decoding of rows by a group of lanes: each lane takes sixteen elements if sixteen divides a row, so that
// codes move in 16-byte accesses. A block of 128 elements, which has one scale, then belongs to eight neighbouring
// lanes.
//
// Rows of other lengths, and groups without eight neighbouring lanes, go element by element: encode_row and decode_row.
#pragma once

#include "../protocol/core/tuning.h"
#include "codes.h"
#include "sums.h"

namespace moe_rt {

inline constexpr int kCodesAtOnce = 16;
inline constexpr int kLanesOfBlock = kCodecBlock / kCodesAtOnce;

struct alignas(16) SixteenCodes {
  uint32_t words[kCodesAtOnce / 4];
};

struct CodesWithScale {
  SixteenCodes codes;
  float scale;
};

// Pieces of rows coded with a buffer's codec.
template <class AccType>
struct CodesFormat {
  using Acc = AccType;
  using Piece = CodesWithScale;
  static constexpr int kSize = kCodesAtOnce, kAtOnce = tuning::kPiecesAtOnce, kTogether = tuning::kCodedRowsTogether;
  Codec codec;
  int64_t scales_at;
  MOE_RT_FN Piece load(const char* row, int at) const {
    return {reinterpret_cast<const SixteenCodes*>(row)[at],
            reinterpret_cast<const float*>(row + scales_at)[at / kLanesOfBlock]};
  }
  MOE_RT_FN void widen(const Piece& piece, Acc* x) const {
    unrolled<kSize, 4>([&](int k) {
      float decoded[4];
      decode_four(codec, piece.codes.words[k / 4], piece.scale, decoded);
      for (int i = 0; i < 4; ++i) x[k + i] = Acc(decoded[i]);
    });
  }
};

// Pieces of kCodesAtOnce elements, of rows stored as vectors of elements.
template <class Elem, class Vector, int kElems>
struct ElementsFormat {
  using Acc = typename Elem::Acc;
  static constexpr int kVectors = kCodesAtOnce / kElems, kSize = kCodesAtOnce;
  static constexpr int kAtOnce = kVectors < tuning::kPiecesAtOnce ? tuning::kPiecesAtOnce / kVectors : 1,
                       kTogether = kAtOnce;
  struct Piece {
    Loaded<Vector> vectors[kVectors];
  };
  MOE_RT_FN Piece load(const char* row, int at) const {
    Piece piece;
    unrolled<kVectors>([&](int i) { piece.vectors[i] = load_vector<Vector>(row, at * kVectors + i); });
    return piece;
  }
  MOE_RT_FN void widen(const Piece& piece, Acc* x) const {
    unrolled<kVectors>([&](int i) {
      const Vector vector = unpacked<Vector>(piece.vectors[i]);
      unrolled<kElems>([&](int k) { x[i * kElems + k] = vector.elem[k].wide(); });
    });
  }
};

// Encodes piece `at` of a row and writes it to each place that each_place passes to its argument. All lanes of a warp
// call it; pieces from num_pieces on are zeros.
template <class Group, class EachPlace, class Acc>
MOE_RT_FN void encode_piece(const Group& group, Codec codec, EachPlace&& each_place, int64_t scales_at, int num_pieces,
                            int at, const Acc* sum) {
  if (at - group.team_lane() >= num_pieces) return;
  float x[kCodesAtOnce];
  uint32_t largest = 0;
  unrolled<kCodesAtOnce>([&](int k) {
    x[k] = float(sum[k]);
    const uint32_t bits = magnitude_bits(x[k]);
    largest = bits > largest ? bits : largest;
  });
  const CodecScale s = codec_scale(codec, group.template team_max<kLanesOfBlock>(largest));
  SixteenCodes codes;
  unrolled<kCodesAtOnce, 4>([&](int k) { codes.words[k / 4] = encode_four(codec, x + k, s.inverse); });
  if (at >= num_pieces) return;
  each_place([&](char* dst) {
    reinterpret_cast<SixteenCodes*>(dst)[at] = codes;
    if (at % kLanesOfBlock == 0) reinterpret_cast<float*>(dst + scales_at)[at / kLanesOfBlock] = s.scale;
  });
}

// Encodes value(i), i < hidden, into a coded row at each place; a team of lanes encodes each block.
template <class Group, class EachPlace, class Value>
MOE_RT_FN void encode_row(const Group& group, Codec codec, int hidden, EachPlace&& each_place, Value&& value) {
  constexpr int kEach = kCodecBlock / Group::kTeamLanes;
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
    const CodecScale s = codec_scale(codec, group.template team_max<Group::kTeamLanes>(largest));
    each_place([&](char* dst) {
      auto* const codes = reinterpret_cast<uint8_t*>(dst);
      for (int i = 0; i < kEach; ++i) {
        if (first + i < hidden) codes[first + i] = encode(codec, values[i], s.inverse);
      }
      if (group.team_lane() == 0) reinterpret_cast<float*>(dst + codec_parts(hidden).scales_at())[block] = s.scale;
    });
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
