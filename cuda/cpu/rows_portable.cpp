// The row primitives compiled for portable; CMakeLists.txt gives this file its instruction-set flags.
#include "rows_body.h"

namespace moe_rt::rows {
extern const Table kTable_portable;
const Table kTable_portable = make_table("portable");
}  // namespace moe_rt::rows
