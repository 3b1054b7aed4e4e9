// Picks the row primitives for this machine.
#include "rows.h"

#include <cstring>

namespace moe_rt::rows {

extern const Table kTable_portable;
#if defined(MOE_RT_X86)
extern const Table kTable_avx2, kTable_avx512;
#endif

const Table* find_table(const char* isa) {
  const bool any = std::strcmp(isa, "auto") == 0;
#if defined(MOE_RT_X86)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if ((any || std::strcmp(isa, "avx512") == 0) && avx512) return &kTable_avx512;
  if ((any || std::strcmp(isa, "avx2") == 0) && avx2) return &kTable_avx2;
#endif
  return any || std::strcmp(isa, "portable") == 0 ? &kTable_portable : nullptr;
}

}  // namespace moe_rt::rows
