// The emulated GPU for Python: one function that launches a kernel by name; tests/device/emulated.py loads it.
#include "emulation.h"

using namespace moe_rt;

// `params` are the addresses of a launch's arguments, as cuLaunchKernel takes them. Returns 0 for an unknown kernel.
extern "C" int emulated_launch(const char* kernel, const char* elem, int hidden, int num_topk, int blocks, int threads,
                               int64_t shared_bytes, void** params, uint32_t seed) {
  const World& w = *static_cast<const World*>(params[0]);
  const Control& c = *static_cast<const Control*>(params[1]);
  const RuntimeDims dims{hidden, num_topk};
  uint32_t known = 1;
  emulation::launch(emulation::MappedLinks{}, blocks, threads, shared_bytes, seed, [&](const auto& m) {
    const auto is = [elem](const char* name) { return std::strcmp(elem, name) == 0; };
    const bool found = is("Bf16")  ? emulation::run_body<RuntimeDims, Bf16>(kernel, m, dims, w, c, params[3])
                       : is("F16") ? emulation::run_body<RuntimeDims, F16>(kernel, m, dims, w, c, params[3])
                       : is("F64") ? emulation::run_body<RuntimeDims, F64>(kernel, m, dims, w, c, params[3])
                                   : emulation::run_body<RuntimeDims, F32>(kernel, m, dims, w, c, params[3]);
    if (!found) store_relaxed(known, 0u);
  });
  return static_cast<int>(known);
}
