// Every memory order of the project: the protocol calls these names and no other file may write an order.
//
// Scope is always the whole system, since a peer may be another process or another GPU. The pairs are
//   publish a window  store_release(signal)      with  load_acquire(signal) in wait_signal          (signal.h)
//   hand a job to a host team, and its barrier   fetch_add_acq_rel / store_release / load_acquire   (host/team.h)
//   exclusive use of an engine                   exchange_acquire with store_release                (host/engine.cpp)
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
inline constexpr auto kRelaxed = cuda::std::memory_order_relaxed;
inline constexpr auto kAcquire = cuda::std::memory_order_acquire;
inline constexpr auto kRelease = cuda::std::memory_order_release;
inline constexpr auto kAcqRel = cuda::std::memory_order_acq_rel;
#else
template <class T>
using SystemRef = std::atomic_ref<T>;
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free, "signals in shared memory must be address-free");
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kAcqRel = std::memory_order_acq_rel;
// The race tests build once with this macro: a detector that stays silent then would prove nothing.
#if defined(MOE_RT_WEAKEN_RELEASE)
inline constexpr auto kRelease = std::memory_order_relaxed;
#else
inline constexpr auto kRelease = std::memory_order_release;
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

template <class T>
MOE_RT_FN T exchange_acquire(T& word, T value) {
  return SystemRef<T>(word).exchange(value, kAcquire);
}

// Writes `value` only over `expected`; true when it did. The first writer of a poison word wins.
template <class T>
MOE_RT_FN bool replace_acq_rel(T& word, T expected, T value) {
  return SystemRef<T>(word).compare_exchange_strong(expected, value, kAcqRel, kRelaxed);
}

// Streaming (non-temporal) stores are not ordered by a release store on x86: every thread that used them calls this
// before the barrier that precedes the signal. Without it a peer could see the signal before the rows.
MOE_RT_FN void streaming_store_fence() {
#if !defined(__CUDACC__) && defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace moe_rt
