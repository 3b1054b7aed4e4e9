// The protocol's memory orders on one word.
#include "../protocol/core/atomics.h"

extern "C" __global__ void publishes(moe_rt::uint64_t* word, moe_rt::uint64_t value) {
  moe_rt::store_release(*word, value);
}

extern "C" __global__ void looks(const moe_rt::uint64_t* word, moe_rt::uint64_t* out) {
  *out = moe_rt::load_acquire(*word);
}
