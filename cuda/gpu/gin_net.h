// NCCL's device interface, GIN, as a network of the kernels (rdma.h). The compile step has included gin_prelude.h.
//
// GIN guarantees less than NVSHMEM. This file relies on the following only:
// * A put returns before its source is read. A wait or a flush ends when sources have been read, and implies nothing
//   about arrival: it protects memory that is about to be overwritten or freed.
// * Only a strong signal implies arrival, of everything put before it for the same peer on the same context. So all
//   data for a peer goes over one context, and every signal is strong. Gets are unordered and may use any context.
// * Signals are added, not set. Segments begin with zeros, and each op of a kind adds one, so that the word is the
//   sequence number. A mailbox has one announcer, which announces every op in the launch that sends or forwards it, or
//   has failed and then never announces again. Adds of two ops may arrive in either order. The word then reads n - 1
//   because of the add of n, which is strong: what belongs to n - 1 has arrived.
// * Signals are unordered among themselves: a mark, which is also a signal, or the signal of a later op of the other
//   kind may be seen before the last signal. That one's header was put and has arrived: before a rank reports a peer
//   as closed or in another op, it checks that header (DeviceIdle::on_its_way).
// * GIN has no compare-and-swap: of two poison words the last one stays, and ranks that have found either report that
//   cause. Both are true, each is whole, and a word never returns to zero.
#pragma once

#include "rdma.h"

namespace moe_rt {

struct Gin : GinHandles {
  static constexpr bool kOrderedSignals = false;

  template <class Group>
  MOE_RT_FN void get(const Group& group, void* here, const void* there, int64_t bytes, int pe) const {
    group.sync();
    if (leads(group)) fetch(here, there, bytes, pe, spread(group, pe));
    group.sync();
  }
  template <class Group>
  MOE_RT_FN void put(const Group& group, void* there, const void* here, int64_t bytes, int pe) const {
    group.sync();
    if (leads(group)) {
      ncclGin_C gin = context(pe);
      hand_over(gin, there, here, bytes, pe, {});
      wait(gin, pe);
    }
    group.sync();
  }
  template <class T>
  MOE_RT_FN void put_value(T* there, T value, int pe) const {
    using Bits = conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    ncclGin_C gin = context(pe);
    const Place to = place(there);
    ncclGinPutValue_v3(&gin, team(), pe, to.window, to.offset, __builtin_bit_cast(Bits, value), sizeof(T),
                       NCCL_GIN_SIGNAL_TYPE_NONE, nullptr, 0, 0, false, ncclGinSignalInc, 0, lane(), false, nullptr,
                       kReleased, kNeeded, ncclGinOptFlagsDefault);
  }
  // SYNC POINT signal over GIN, writer side. Pairs with wait_signal, whose load is the load with which GIN itself reads
  // signals. The signal is strong. OnFailure only the header would be certain to have arrived, and a reader would take
  // rows or sums of an earlier op.
  MOE_RT_FN void put_signal(Header* there, const Header* here, uint64_t* signal, uint64_t, int pe) const {
    ncclGin_C gin = context(pe);
    hand_over(gin, there, here, sizeof(Header), pe, {signal, /*strong=*/true});
  }
  MOE_RT_FN void before_signals() const {}  // signals are strong
  MOE_RT_FN void fence() const {}           // signals are added
  MOE_RT_FN void poison(uint64_t* there, uint64_t word, int pe) const { put_value(there, word, pe); }
  // SYNC POINT closed over GIN, writer side. Pairs with closed_before. The mark is strong, so that the last header has
  // arrived; otherwise a reader would abandon an op that is complete.
  MOE_RT_FN void mark(uint64_t* there, int pe) const {
    ncclGin_C gin = context(pe);
    const Place word = place(there);
    ncclGinSignal_v3(&gin, team(), pe, NCCL_GIN_SIGNAL_TYPE_VA, word.window, word.offset, 0, /*isStrong=*/true,
                     ncclGinSignalInc, 1, lane(), false, nullptr, kReleased, kNeeded, ncclGinOptFlagsDefault);
  }
  MOE_RT_FN void quiet() const {
    for (uint32_t i = 0; i < all().ginContextCount; ++i) {
      ncclGin_C gin = context(i);
      ncclGinFlush(&gin, lane(), kAcquire);
    }
  }

 private:
  // The network may read another GPU's writes over NVLink, so no caller's fence can replace the fence that GIN needs.
  static constexpr cuda::thread_scope kReleased = cuda::thread_scope_thread, kNeeded = cuda::thread_scope_system;
  struct Place {
    ncclWindow_t window;
    size_t offset;
  };
  struct Signal {
    const uint64_t* word;  // nullptr: none
    bool strong;
  };

  MOE_RT_FN Place place(const void* address) const {
    const int64_t offset = static_cast<const char*>(address) - segment;
    if (below(offset, segment_bytes)) return {static_cast<ncclWindow_t>(segment_window), size_t(offset)};
    return {static_cast<ncclWindow_t>(memory_window), size_t(static_cast<const char*>(address) - memory)};
  }
  MOE_RT_FN const ncclDevComm& all() const { return *static_cast<const ncclDevComm*>(comm); }
  MOE_RT_FN ncclTeam team() const { return {all().nRanks, all().rank, 1}; }
  MOE_RT_FN ncclGin_C context(int64_t i) const {
    return ncclGin_C(all(), NCCL_GIN_BACKEND_MASK_ALL, int(i % all().ginContextCount));
  }
  MOE_RT_FN static ncclCoopAny lane() { return ncclCoopThread{}; }
  template <class Group>
  MOE_RT_FN static bool leads(const Group& group) {
    if constexpr (requires { group.rank(); }) {
      return group.rank() == 0;
    } else {
      return group.leader();
    }
  }
  // Context of a get: warps take turns, and each block has its own source.
  template <class Group>
  MOE_RT_FN static int64_t spread(const Group& group, int pe) {
    if constexpr (requires { group.index; }) {
      return group.index;
    } else {
      return pe;
    }
  }
  // Not inline: otherwise each get of a kernel would contain NCCL's code for each of its back ends, and exceed the
  // registers.
  MOE_RT_FN __attribute__((noinline)) void fetch(void* here, const void* there, int64_t bytes, int pe,
                                                 int64_t any) const {
    ncclGin_C gin = context(any);
    const Place from = place(there), to = place(here);
    ncclGinGet_v2(&gin, team(), pe, from.window, from.offset, to.window, to.offset, size_t(bytes), lane(), false,
                  nullptr, ncclGinOptFlagsDefault, ncclGinSegmentTypeDevice);
    wait(gin, pe);
  }
  MOE_RT_FN void hand_over(ncclGin_C& gin, void* there, const void* here, int64_t bytes, int pe, Signal signal) const {
    const Place from = place(here), to = place(there);
    const Place word = signal.word ? place(signal.word) : Place{};
    ncclGinPut_v3(&gin, team(), pe, to.window, to.offset, from.window, from.offset, size_t(bytes),
                  signal.word ? NCCL_GIN_SIGNAL_TYPE_VA : NCCL_GIN_SIGNAL_TYPE_NONE, word.window, word.offset, 0,
                  signal.strong, ncclGinSignalInc, 1, false, 0, lane(), false, nullptr, kReleased, kNeeded,
                  ncclGinOptFlagsDefault, ncclGinSegmentTypeDevice);
  }
  // Waits until this lane's requests to the context for this peer are complete here: gets have arrived, sources are
  // read.
  MOE_RT_FN void wait(ncclGin_C& gin, int pe) const {
    ncclGinRequest_t request;
    ncclGinFlushAsync(&gin, team(), uint32_t(pe), &request, lane(), ncclGinOptFlagsDefault, false, nullptr);
    ncclGinWait(&gin, &request, lane(), false, nullptr, kAcquire);
  }
};

}  // namespace moe_rt
