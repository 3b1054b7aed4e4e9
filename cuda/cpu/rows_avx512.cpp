// The row primitives compiled for avx512; CMakeLists.txt gives this file its instruction-set flags.
#include "rows_body.h"

namespace moe_rt::rows {
extern const Table kTable_avx512;
const Table kTable_avx512 = make_table("avx512");
}  // namespace moe_rt::rows
