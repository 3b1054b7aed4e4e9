// Bulk copies of GPUs with compute capability 9.0 or more, as rings use them (moving.h).
#pragma once

#include "../protocol/core/atomics.h"
#include "machine.h"
#include "moving.h"

namespace moe_rt {

class BulkCopies {
 public:
  // Initialises a barrier for each slot. Its phase ends when one piece's bytes have arrived; the single expected
  // arrival is that of the lane that announced the byte count.
  __device__ void open(char* barriers, int stride) const {
#pragma unroll 1
    for (int i = 0; i < kRingSlots; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(barriers + i * stride)) : "memory");
    }
    bulk_barriers_fence();
    bulk_copies_fence();
  }
  __device__ void load(uint64_t* barrier, char* to, const char* from, int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(to)),
        "l"(global(from)), "r"(bytes), "r"(shared(barrier))
        : "memory");
  }
  // A bulk copy always completes: this wait depends on no other lane.
  __device__ void await_load(uint64_t* barrier, uint32_t parity) const {
    for (uint32_t there = 0; there == 0;) {
      asm volatile(
          "{ .reg .pred there;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n"
          "selp.u32 %0, 1, 0, there; }"
          : "=r"(there)
          : "r"(shared(barrier)), "r"(parity)
          : "memory");
    }
  }
  __device__ void store(char* to, const char* from, int bytes) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global(to)), "r"(shared(from)),
                 "r"(bytes)
                 : "memory");
  }
  __device__ void commit() const { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
  template <int kGroups>
  __device__ void await_reads() const {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
  }
  __device__ void await_stores() const { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

 private:
  __device__ static uint32_t shared(const void* address) { return uint32_t(__cvta_generic_to_shared(address)); }
  __device__ static uint64_t global(const void* address) { return uint64_t(__cvta_generic_to_global(address)); }
};

// Links to mapped peers (machine.h), with rings for the warps of a block.
struct RingLinks {
  static constexpr bool kWarpsOnly = false, kTwoLevel = false, kOrderedSignals = true;
  RingMemory memory;
  __device__ MappedLink link() const { return {}; }
  template <class Group>
  __device__ MappedLink link(const Group&) const {
    return {};
  }
  template <class Machine>
  __device__ Ring<BulkCopies> ring(const Machine& m, int num_topk) const {
    return {memory, num_topk, reinterpret_cast<char*>(m.scratch()), int(threadIdx.x) / WarpLanes::kTeamLanes};
  }
};

}  // namespace moe_rt
