// The emulated GPU whose ranks reach each other over NCCL's device interface, in fp32 and bf16.
#include "emulated_gin.h"

using namespace moe_rt;

extern "C" emulation::Room* emulated_room(int blocks) { return new emulation::Room(blocks); }
extern "C" void emulated_drain() { GinCards::all().drain(); }
// Stand-in for nccl.core on the host: makes a device communicator in the caller's memory, and a window, which stays.
extern "C" int64_t emulated_comm(int rank, int num_ranks, void* room) {
  if (room) new (room) ncclDevComm{rank, num_ranks, /*ginContextCount=*/3};
  return sizeof(ncclDevComm);
}
extern "C" const void* emulated_window(int num_ranks, char* const* begins) {
  return new ncclWindow{{begins, begins + num_ranks}};
}
extern "C" void emulated_backwards(uint32_t whether) { GinCards::all().go_backwards(whether); }

// See emulated_launch of emulation.cpp. Here every launch uses the network, which its arguments describe.
extern "C" int emulated_launch(emulation::Room* room, const char* kernel, const char* elem, int hidden, int num_topk,
                               int dispatch_codec, int combine_codec, int blocks, int threads, int64_t shared_bytes,
                               void** params, char* const*, uint32_t seed) {
  const World& w = *static_cast<const World*>(params[0]);
  const Control& c = *static_cast<const Control*>(params[1]);
  const RuntimeDims dims{hidden, num_topk, static_cast<Codec>(dispatch_codec), static_cast<Codec>(combine_codec),
                         w.shape.sums};
  uint32_t known = 1;
  const auto launch_over = [&](const auto& links) {
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
    launch_over(*static_cast<const NodeLinks<Gin>*>(params[2]));
  } else {
    launch_over(*static_cast<const RdmaLinks<Gin>*>(params[2]));
  }
  return static_cast<int>(known);
}
