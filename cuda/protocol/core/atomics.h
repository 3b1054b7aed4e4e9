// Every memory order of the project: the protocol calls these names, and no other file may write an order.
//
// The scope is the whole system, since a peer may be another process or another GPU. Names with `device` have the scope
// of one rank. The pairs are
//   publish a window  store_release(signal)      with  load_acquire(signal) in wait_signal          (signal.h)
//   record an op                                 store_release with load_acquire, word by word      (cpu/recording.h)
//   leave a segment header                       store_release with load_acquire of its magic       (cpu/recording.h)
//   leave last words                             store_release with load_acquire of their length    (cpu/recording.h)
//   the barrier of a host team                   fetch_add_acq_rel; store_release and wake_sleepers
//                                                with load_acquire and sleep_while                  (cpu/team.h)
//   exclusive use of an engine                   exchange_acquire with store_release                (cpu/exchange.h)
//   hand a launch's writes to its last block     fetch_add_device with itself                       (gpu/exchange.h)
//   report a failure to the host                 store_release with the host's read of the record   (gpu/exchange.h)
//   let bulk copies read what lanes wrote        bulk_copies_fence following an acquire             (gpu/moving.h)
// Relaxed read-modify-writes collect bits and minima in scratch memory that a barrier publishes.
#pragma once

#include "platform.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#endif

namespace moe_rt {

#if defined(__CUDACC__)
template <class T>
using SystemRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
template <class T>
using DeviceRef = cuda::atomic_ref<T, cuda::thread_scope_device>;
inline constexpr auto kRelaxed = cuda::std::memory_order_relaxed;
inline constexpr auto kAcquire = cuda::std::memory_order_acquire;
inline constexpr auto kRelease = cuda::std::memory_order_release;
inline constexpr auto kAcqRel = cuda::std::memory_order_acq_rel;
inline constexpr auto kLastBlock = cuda::std::memory_order_acq_rel;
#else
template <class T>
using SystemRef = std::atomic_ref<T>;
template <class T>
using DeviceRef = std::atomic_ref<T>;
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free, "signals in shared memory must be address-free");
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kAcqRel = std::memory_order_acq_rel;
// The race tests relax one at a time, at run time: a detector that stays silent then would prove nothing.
#if defined(MOE_RT_WEAKENABLE)
inline auto kRelease = std::memory_order_release, kLastBlock = std::memory_order_acq_rel;
#else
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kLastBlock = std::memory_order_acq_rel;
#endif
#endif

// atomic_ref wants a mutable object even to load from it.
template <class T>
MOE_RT_FN T load_acquire(const T& word) {
  return SystemRef<T>(const_cast<T&>(word)).load(kAcquire);
}

template <class T>
MOE_RT_FN T load_relaxed(const T& word) {
  return SystemRef<T>(const_cast<T&>(word)).load(kRelaxed);
}

// Keeps each word in a register from this point. It uses no loop, and the GPU version is not volatile, which would keep
// arrays in memory, also those of the surrounding code.
template <int kWords>
MOE_RT_FN void pin(uint32_t* words) {
  if constexpr (kWords > 0) {
#if defined(__CUDACC__)
    asm("" : "+r"(words[kWords - 1]));
#else
    asm volatile("" : "+r"(words[kWords - 1]));
#endif
    pin<kWords - 1>(words);
  }
}

// Copies a value that a peer may be rewriting and loads each word once. Without it: 1. this rank checks a word, 2. a
// peer changes it, 3. the compiler loads it again, and this rank follows an unchecked value. The load is a plain one,
// which a GPU may serve from its cache; after the empty asm statement the compiler can take the word only from the
// register.
template <class T>
MOE_RT_FN T read_once(const T& shared) {
  constexpr int kWords = sizeof(T) / sizeof(uint32_t);
  static_assert(is_trivially_copyable_v<T> && sizeof(T) == kWords * sizeof(uint32_t), "whole words");
  struct Words {
    uint32_t of[kWords];
  };
  Words words = __builtin_bit_cast(Words, shared);
  pin<kWords>(words.of);
  return __builtin_bit_cast(T, words);
}

template <class T>
MOE_RT_FN void store_release(T& word, T value) {
  SystemRef<T>(word).store(value, kRelease);
}

template <class T>
MOE_RT_FN void store_relaxed(T& word, T value) {
  SystemRef<T>(word).store(value, kRelaxed);
}

template <class T>
MOE_RT_FN T fetch_add_acq_rel(T& word, T value) {
  return SystemRef<T>(word).fetch_add(value, kAcqRel);
}

// SYNC POINT last block: a block's lanes sync, then one of them adds. Release: the block's writes come before its
// count. Acquire: the block that completes the count sees every other block's writes, and its signal at system scope
// publishes them as well. Without either half a peer could see the signal before another block's rows.
template <class T>
MOE_RT_FN T fetch_add_device(T& word, T value) {
  return DeviceRef<T>(word).fetch_add(value, kLastBlock);
}

template <class T>
MOE_RT_FN void fetch_add_relaxed(T& word, T value) {
  DeviceRef<T>(word).fetch_add(value, kRelaxed);
}

template <class T>
MOE_RT_FN void fetch_or_relaxed(T& word, T bits) {
  DeviceRef<T>(word).fetch_or(bits, kRelaxed);
}

template <class T>
MOE_RT_FN void fetch_min_relaxed(T& word, T value) {
#if defined(__CUDACC__)
  DeviceRef<T>(word).fetch_min(value, kRelaxed);
#else
  T seen = load_relaxed(word);
  while (value < seen && !DeviceRef<T>(word).compare_exchange_weak(seen, value, kRelaxed)) continue;
#endif
}

template <class T>
MOE_RT_FN T exchange_acquire(T& word, T value) {
  return SystemRef<T>(word).exchange(value, kAcquire);
}

// Writes `value` only over `expected`; true when it did. The first writer of a poison word wins.
template <class T>
MOE_RT_FN bool replace_acq_rel(T& word, T expected, T value) {
  return SystemRef<T>(word).compare_exchange_strong(expected, value, kAcqRel, kRelaxed);
}

// A network card takes no part in the pairs above: it reads this rank's rows when a peer asks, and writes rows that
// this rank has asked for. This fence completes all accesses at system scope before the card reads and after it has
// written.
MOE_RT_FN void network_fence() {
#if defined(__CUDACC__)
  cuda::atomic_thread_fence(kAcqRel, cuda::thread_scope_system);
#endif
}

// SYNC POINT bulk copies. Bulk copies see lanes' writes only after this fence, executed by a lane that has observed
// them: it follows the acquire of wait_signal, whose pair is the peer's release, and a barrier of the block. Without
// it: 1. a peer writes rows and releases the signal, 2. a lane here acquires it, 3. a bulk copy reads memory as it was
// before 1. Bulk copies' stores need no fence: a lane that has waited for their completion sees them, and its release
// publishes them. Without `.global` the machine code would fence shared memory only.
MOE_RT_FN void bulk_copies_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// SYNC POINT barriers of bulk copies. Barriers are initialised in shared memory. Without the fence: 1. a lane
// initialises a barrier, 2. a copy that it starts counts its bytes on memory that does not hold the barrier yet.
MOE_RT_FN void bulk_barriers_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

#if !defined(__CUDACC__)
// SYNC POINT barrier, asleep. Returns once the word is not `value`; pairs with store_release, then wake_sleepers. The
// kernel compares once more before it puts a thread to sleep. Without that: 1. a lane sees the old generation, 2. the
// last lane raises it and finds no sleeper, 3. the lane sleeps and is never woken.
template <class T>
void sleep_while(const T& word, T value) {
  SystemRef<T>(const_cast<T&>(word)).wait(value, kAcquire);
}

template <class T>
void wake_sleepers(T& word) {
  SystemRef<T>(word).notify_all();
}
#endif

// A release store on x86 does not order streaming (non-temporal) stores. Every thread that used them must call this
// before the barrier that precedes the signal. Without it a peer could see the signal before the rows.
MOE_RT_FN void streaming_store_fence() {
#if !defined(__CUDACC__) && defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace moe_rt
