// The CPU's side of codes.cu.
#include "../../cuda/protocol/core/codec.h"

using namespace moe_rt;

extern "C" void encode_codes(const float* x, const float* inverse, uint8_t* codes, int n, int fp8) {
  for (int i = 0; i < n; ++i) codes[i] = encode(fp8 ? Codec::kFp8 : Codec::kInt8, x[i], inverse[i / 4]);
}

extern "C" void decode_codes(const uint8_t* codes, const float* scales, float* x, int n, int fp8) {
  for (int i = 0; i < n; ++i) x[i] = decode(fp8 ? Codec::kFp8 : Codec::kInt8, codes[i], scales[i / 4]);
}
