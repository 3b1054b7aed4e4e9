// The emulated GPU whose ranks reach each other over NCCL's device interface, in fp32 and bf16.
#include "emulated_gin.h"

using namespace moe_rt;

extern "C" emulation::Room* emulated_room(int blocks) { return new emulation::Room(blocks); }
extern "C" void emulated_drain() { GinCards::all().drain(); }
extern "C" void emulated_backwards(uint32_t whether) { GinCards::all().go_backwards(whether); }

// As emulated_launch of emulation.cpp, where all launches are over the network.
extern "C" int emulated_launch(emulation::Room* room, const char* kernel, const char* elem, int hidden, int num_topk,
                               int dispatch_codec, int combine_codec, int blocks, int threads, int64_t shared_bytes,
                               void** params, char* const* segments, uint32_t seed) {
  const World& w = *static_cast<const World*>(params[0]);
  const Control& c = *static_cast<const Control*>(params[1]);
  const RuntimeDims dims{hidden, num_topk, static_cast<Codec>(dispatch_codec), static_cast<Codec>(combine_codec)};
  uint32_t known = 1;
  const auto launch_over = [&](auto links) {
    links.memory = *static_cast<const NetworkMemory*>(params[2]);
    links.net = GinCards::all().net(w, links.memory, segments);
    const auto body = [&](const auto& m) {
      bool found = false;
      if (std::strcmp(elem, "F32") == 0) {
        found = emulation::run_body<RuntimeDims, F32>(kernel, m, dims, w, c, params[3]);
      } else if (std::strcmp(elem, "Bf16") == 0) {
        found = emulation::run_body<RuntimeDims, Bf16>(kernel, m, dims, w, c, params[3]);
      }
      if (!found) store_relaxed(known, 0u);
    };
    if (threads % 32 == 0) {
      emulation::launch<32>(links, blocks, threads, shared_bytes, seed, room, body);
    } else {
      emulation::launch<1>(links, blocks, threads, shared_bytes, seed, room, body);
    }
  };
  if (w.shape.two_level()) {
    launch_over(NodeLinks<Gin>{});
  } else {
    launch_over(RdmaLinks<Gin>{});
  }
  return static_cast<int>(known);
}
