// NCCL's device interface, GIN, as a network of the kernels (rdma.h). The compile step has included gin_prelude.h.
//
// GIN promises less than NVSHMEM, and no more than this is leaned on:
// * A put returns before its source is read. A wait or a flush ends when sources have been read, and tells nothing of
//   what has arrived: it is for memory that is to be written again, or to go.
// * Only a strong signal tells what has arrived: all that was put for the same peer on the same context before it. So what
//   goes to a peer goes over one context, and every signal is strong. Gets are in no order with anything, and take any.
// * Signals are added, and not set. Segments begin with zeros, and each op of a kind adds one, so that the word is the
//   sequence number: a mailbox has one announcer, which announces every op in the launch that sends or forwards it, or
//   has failed, and then announces nothing ever again. Adds of two ops may arrive in either order. The word then says
//   n - 1 by the add of n, which is strong: what belongs to n - 1 is there.
// * Signals have no order among themselves: a mark, which is one, too, or that of a later op of the other kind may be seen
//   before the last signal is. Its header was put, and is there: whoever would find the peer gone, or in another op, looks
//   at that first (DeviceIdle::on_its_way).
// * There is no compare-and-swap: of two poison words the last one stays, and ranks that have found either name that cause.
//   Both are true, each is whole, and a word is never zero again.
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
  // SYNC POINT signal over GIN, writer side: pairs with wait_signal, whose load is the one that GIN reads signals with. It
  // is strong: else the header alone would be sure to be there, and a reader would take rows or sums of an op before.
  MOE_RT_FN void put_signal(Header* there, const Header* here, uint64_t* signal, uint64_t, int pe) const {
    ncclGin_C gin = context(pe);
    hand_over(gin, there, here, sizeof(Header), pe, {signal, /*strong=*/true});
  }
  MOE_RT_FN void before_signals() const {}  // they are strong
  MOE_RT_FN void fence() const {}           // and are added
  MOE_RT_FN void poison(uint64_t* there, uint64_t word, int pe) const { put_value(there, word, pe); }
  // SYNC POINT closed over GIN, writer side: pairs with closed_before. Strong, so that the last header is there; without
  // it an op that is complete would be given up.
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
  // What the network reads may be another GPU's writes, over NVLink; no caller's fence is taken for what GIN needs.
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
  // The context of a get: warps take turns, and blocks each have a source of their own.
  template <class Group>
  MOE_RT_FN static int64_t spread(const Group& group, int pe) {
    if constexpr (requires { group.index; }) {
      return group.index;
    } else {
      return pe;
    }
  }
  // Not inline: what NCCL does for each of its back ends would be in a kernel for each get, and registers would not suffice.
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
  // Until what this lane has asked of the context for this peer is done here: gets are in, and sources read.
  MOE_RT_FN void wait(ncclGin_C& gin, int pe) const {
    ncclGinRequest_t request;
    ncclGinFlushAsync(&gin, team(), uint32_t(pe), &request, lane(), ncclGinOptFlagsDefault, false, nullptr);
    ncclGinWait(&gin, &request, lane(), false, nullptr, kAcquire);
  }
};

}  // namespace moe_rt
