// Selects the row primitives for this machine.
#include "rows.h"

#include <cstring>
#if defined(MOE_RT_X86)
#include <cpuid.h>
#endif

namespace moe_rt::rows {

extern const Table kTable_portable;
#if defined(MOE_RT_X86)
extern const Table kTable_avx2, kTable_avx512;

namespace {
// Reads CPUID, because __builtin_cpu_supports of clang 13 to 16 rejects "f16c".
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
}  // namespace
#endif

const Table* find_table(const char* isa) {
  const bool any = std::strcmp(isa, "auto") == 0;
#if defined(MOE_RT_X86)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  if ((any || std::strcmp(isa, "avx512") == 0) && avx512) return &kTable_avx512;
  if ((any || std::strcmp(isa, "avx2") == 0) && avx2) return &kTable_avx2;
#endif
  return any || std::strcmp(isa, "portable") == 0 ? &kTable_portable : nullptr;
}

}  // namespace moe_rt::rows
