// Encodes and decodes codes in groups of four, as kernels do, for a test that compares them with the CPU's.
#include "codes.h"

struct Four {
  float x[4], scale;
  uint32_t codes;
};

// Each lane encodes one x; scale is a block's reciprocal.
extern "C" __global__ void __launch_bounds__(256) encode(Four* fours, int fp8) {
  Four& four = fours[blockIdx.x * blockDim.x + threadIdx.x];
  four.codes = moe_rt::encode_four(fp8 ? moe_rt::Codec::kFp8 : moe_rt::Codec::kInt8, four.x, four.scale);
}

extern "C" __global__ void __launch_bounds__(256) decode(Four* fours, int fp8) {
  Four& four = fours[blockIdx.x * blockDim.x + threadIdx.x];
  moe_rt::decode_four(fp8 ? moe_rt::Codec::kFp8 : moe_rt::Codec::kInt8, four.codes, four.scale, four.x);
}
