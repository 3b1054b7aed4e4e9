// The emulated GPU for Python: functions that launch a kernel by name; tests/support/emulated_gpu.py loads them.
#include "emulation.h"

#include "../../cuda/gpu/activation.h"
#include "emulated_network.h"
#include "emulated_ring.h"

using namespace moe_rt;

namespace {

using NetworkLinks = RdmaLinks<emulation::Network>;
using NetworkNodes = NodeLinks<emulation::Network>;

template <class Elem, class Machine>
bool run_kernel(const char* kernel, const Machine& m, const RuntimeDims& dims, void** params) {
  const World& w = *static_cast<const World*>(params[0]);
  const Control& c = *static_cast<const Control*>(params[1]);
  return emulation::run_body<RuntimeDims, Elem>(kernel, m, dims, w, c, params[3]);
}

template <class Elem, class Machine>
void run_activation(const Machine& m, bool backward, const void* args) {
  if (backward) {
    swiglu_backward<Elem>(m, *static_cast<const SwigluBackwardArgs*>(args));
  } else {
    swiglu_forward<Elem>(m, *static_cast<const SwigluArgs*>(args));
  }
}

// Use warps of 32 lanes if they divide the block, else warps of one lane.
template <class Links, class Body>
void launch_in_warps(const Links& links, int blocks, int threads, int64_t shared_bytes, uint32_t seed,
                     emulation::Room* room, Body&& body) {
  if (threads % 32 == 0) {
    emulation::launch<32>(links, blocks, threads, shared_bytes, seed, room, body);
  } else {
    emulation::launch<1>(links, blocks, threads, shared_bytes, seed, room, body);
  }
}

}  // namespace

extern "C" emulation::Room* emulated_room(int blocks) { return new emulation::Room(blocks); }
extern "C" void emulated_drain() { emulation::Cards::all().drain(); }

// `params` are the addresses of a launch's arguments, as for cuLaunchKernel; `segments` is the network's table of
// segments, or nullptr without a network. `room` limits the GPU's resident blocks. Returns 0 for an unknown kernel.
extern "C" int emulated_launch(emulation::Room* room, const char* kernel, const char* elem, int hidden, int num_topk,
                               int dispatch_codec, int combine_codec, int blocks, int threads, int64_t shared_bytes,
                               void** params, [[maybe_unused]] char* const* segments, uint32_t seed) {
  uint32_t known = 1;
  const auto body = [&](const auto& m) {
    const RuntimeDims dims{hidden, num_topk, static_cast<Codec>(dispatch_codec), static_cast<Codec>(combine_codec),
                           static_cast<const World*>(params[0])->shape.sums};
    bool found = false;
    with_element(elem, [&](auto e) { found = run_kernel<decltype(e)>(kernel, m, dims, params); });
    if (!found) store_relaxed(known, 0u);
  };
#if !defined(MOE_RT_EMULATED_RING)  // reads from mapped peers only
  const auto launch_over = [&](auto links) {
    links.memory = *static_cast<const NetworkMemory*>(params[2]);
    links.net = {segments, links.memory.segment};
    launch_in_warps(links, blocks, threads, shared_bytes, seed, room, body);
    return static_cast<int>(known);
  };
  if (segments && static_cast<const World*>(params[0])->shape.two_level()) return launch_over(NetworkNodes{});
  if (segments) return launch_over(NetworkLinks{});
#endif
  launch_in_warps(emulation::mapped_links(params), blocks, threads, shared_bytes, seed, room, body);
  return static_cast<int>(known);
}

// The kernels of activation.cu, whose one argument is at `args`.
extern "C" void emulated_activation(int backward, const char* elem, int blocks, int threads, const void* args,
                                    uint32_t seed) {
  launch_in_warps(emulation::MappedLinks{}, blocks, threads, 0, seed, nullptr, [&](const auto& m) {
    with_element(elem, [&](auto e) { run_activation<decltype(e)>(m, backward, args); });
  });
}
