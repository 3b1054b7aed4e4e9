// The row primitives compiled for avx2; CMakeLists.txt gives this file its instruction-set flags.
#include "rows_body.h"

namespace moe_rt::rows {
extern const Table kTable_avx2;
const Table kTable_avx2 = make_table("avx2");
}  // namespace moe_rt::rows
