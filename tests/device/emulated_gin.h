// NCCL's device functions on host threads, as cuda/gpu/gin_net.h calls them, with no guarantee beyond NCCL's.
// Requests of a context complete at any time and in any order. A wait or a flush ends when sources have been read and
// gets have arrived. A strong signal follows all earlier puts for the same peer on the same context, but not their
// signals; a weak signal follows only the put it belongs to.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "../../cuda/gpu/rdma.h"
#include "emulation.h"

namespace cuda {
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
}  // namespace cuda

using Order = std::remove_const_t<decltype(moe_rt::kAcquire)>;

// The parts of NCCL's types that are used.
struct ncclDevComm {
  int rank, nRanks;
  uint32_t ginContextCount;
};
struct ncclWindow {
  std::vector<char*> begins;  // by rank
};
using ncclWindow_t = const ncclWindow*;
using ncclGinSignal_t = uint32_t;
using ncclGinCounter_t = uint32_t;
struct ncclTeam {
  int nRanks, rank, stride;
};
struct ncclCoopThread {};
struct ncclCoopAny {
  ncclCoopAny(ncclCoopThread) {}
};
struct ncclGinDescriptorSmem;
struct ncclGinRequest_t {
  int peer;
};
enum { ncclGinOptFlagsDefault = 0, NCCL_GIN_BACKEND_MASK_ALL = 0xff };

// Ends the process, since nothing here behaves differently for arguments that only a real network heeds.
inline void expect_call(bool meant, const char* function) {
  if (meant) return;
  std::fprintf(stderr, "%s: got other arguments than gin_net.h must pass\n", function);
  std::abort();
}

struct ncclGin_C {
  const ncclDevComm& comm;
  int context;
  ncclGin_C(const ncclDevComm& c, unsigned backends, int i) : comm(c), context(i) {
    expect_call(backends == NCCL_GIN_BACKEND_MASK_ALL && i >= 0 && uint32_t(i) < c.ginContextCount, "ncclGin_C");
  }
};
enum ncclGinSignalType { NCCL_GIN_SIGNAL_TYPE_NONE, NCCL_GIN_SIGNAL_TYPE_VA };
enum ncclGinSignalOp_t { ncclGinSignalInc };
enum ncclGinSegmentType_t { ncclGinSegmentTypeDevice };

#define NCCL_FUNCTION(Returned, name, ...) inline Returned name(__VA_ARGS__);
#include "gin_functions.h"
#undef NCCL_FUNCTION

#include "../../cuda/gpu/gin_net.h"

namespace moe_rt::emulation {

// Requests of one rank to one context for one peer.
class GinQueue {
 public:
  struct Task {
    const char* from;  // nullptr once it has been read
    char* to;
    std::vector<char> data;
    bool is_get = false, settled = false;
    uint64_t* word = nullptr;  // of a signal that was not added yet
    bool strong = false;
  };
  void add(Task task) { tasks_.push_back(std::move(task)); }
  // Complete what a wait covers.
  void complete() {
    for (Task& task : tasks_) task.is_get ? settle(task) : read(task);
    clear();
  }
  void drain() {
    while (!tasks_.empty()) do_any(0);
  }
  // Prefer signals, so that operations they do not wait for complete late.
  void do_any(uint32_t random) {
    if (tasks_.empty()) return;
    size_t i = random / 4 % tasks_.size();
    while (random % 4 != 0 && i + 1 < tasks_.size() && !tasks_[i].word) ++i;
    do_task(i, random);
  }
  // Complete the last signal first.
  void do_last() {
    size_t i = tasks_.size();
    while (i-- > 0 && !tasks_[i].word) continue;
    if (!tasks_.empty()) do_task(i < tasks_.size() ? i : 0, 0);
  }

 private:
  void do_task(size_t i, uint32_t random) {
    Task& task = tasks_[i];
    if (task.from && random % 8 == 4) return read(task);
    settle(task);
    if (task.word) {
      for (size_t before = 0; task.strong && before < i; ++before) {
        if (!tasks_[before].is_get) settle(tasks_[before]);
      }
      fetch_add_acq_rel(*task.word, uint64_t{1});
      task.word = nullptr;
    }
    clear();
  }
  static void read(Task& task) {
    if (task.from) std::memcpy(task.data.data(), task.from, task.data.size());
    task.from = nullptr;
  }
  static void settle(Task& task) {
    if (task.settled) return;
    read(task);
    const auto words = reinterpret_cast<uint64_t>(task.to) | task.data.size();
    for (size_t i = 0; i < task.data.size() && words % 8 == 0; i += 8) {  // lanes may be polling one of these words
      uint64_t word;
      std::memcpy(&word, &task.data[i], sizeof(word));
      store_relaxed(*reinterpret_cast<uint64_t*>(task.to + i), word);
    }
    if (words % 8 != 0) std::memcpy(task.to, task.data.data(), task.data.size());
    task.settled = true;
  }
  void clear() {
    std::erase_if(tasks_, [](const Task& task) { return task.settled && !task.word; });
  }
  std::vector<Task> tasks_;
};

// All queues, and a thread that processes them. They live as long as the process.
class GinCards {
 public:
  static GinCards& all() {
    static GinCards* const cards = new GinCards;
    return *cards;
  }
  template <class Act>
  void with(const ncclGin_C& gin, int peer, Act&& act) {
    std::lock_guard lock(mutex_);
    act(queues_[{&gin.comm, gin.context, peer}]);
  }
  void drain() {
    std::lock_guard lock(mutex_);
    for (auto& [_, queue] : queues_) queue.drain();
  }
  // If set, signals become visible in reverse order, with pauses long enough for peers to check.
  void go_backwards(uint32_t whether) { store_relaxed(backwards_, whether); }

 private:
  GinCards() {
    std::thread([this] {
      std::mt19937 random{2};
      for (;;) {
        const bool backwards = load_relaxed(backwards_) != 0;
        std::this_thread::sleep_for(std::chrono::microseconds(backwards ? 4000 : random() % 100));
        std::lock_guard lock(mutex_);
        for (auto& [_, queue] : queues_) {
          if (random() % 4 != 0) continue;
          backwards ? queue.do_last() : queue.do_any(random());
        }
      }
    }).detach();
  }
  uint32_t backwards_ = 0;
  std::mutex mutex_;
  std::map<std::tuple<const ncclDevComm*, int, int>, GinQueue> queues_;
};

inline char* at(const ncclGin_C& gin, ncclWindow_t window, size_t offset, int rank = -1) {
  return window->begins[size_t(rank < 0 ? gin.comm.rank : rank)] + offset;
}
// Ranks of the whole communicator, numbered as in it.
inline bool is_all(const ncclGin_C& gin, const ncclTeam& team) {
  return team.nRanks == gin.comm.nRanks && team.rank == gin.comm.rank && team.stride == 1;
}
// The network reads writes of other GPUs too, so a fence at system scope is needed, and none was there before.
inline bool is_fenced(cuda::thread_scope given, cuda::thread_scope needed) {
  return given == cuda::thread_scope_thread && needed == cuda::thread_scope_system;
}
inline void ask(ncclGin_C* gin, int peer, GinQueue::Task task) {
  GinCards::all().with(*gin, peer, [&](GinQueue& queue) { queue.add(std::move(task)); });
}

}  // namespace moe_rt::emulation

using moe_rt::emulation::ask;
using moe_rt::emulation::at;
using moe_rt::emulation::GinCards;
using moe_rt::emulation::GinQueue;
using moe_rt::emulation::is_all;
using moe_rt::emulation::is_fenced;

inline void ncclGinGet_v2(ncclGin_C* gin, ncclTeam team, int peer, ncclWindow_t from, size_t from_offset,
                          ncclWindow_t to, size_t to_offset, size_t bytes, ncclCoopAny, bool described,
                          ncclGinDescriptorSmem*, uint32_t flags, ncclGinSegmentType_t) {
  expect_call(is_all(*gin, team) && !described && flags == ncclGinOptFlagsDefault, "ncclGinGet_v2");
  ask(gin, peer,
      {at(*gin, from, from_offset, peer), at(*gin, to, to_offset), std::vector<char>(bytes), /*is_get=*/true});
}
inline void ncclGinPut_v3(ncclGin_C* gin, ncclTeam team, int peer, ncclWindow_t to, size_t to_offset, ncclWindow_t from,
                          size_t from_offset, size_t bytes, ncclGinSignalType type, ncclWindow_t signal,
                          size_t signal_offset, ncclGinSignal_t, bool strong, ncclGinSignalOp_t, unsigned long,
                          bool counts, ncclGinCounter_t, ncclCoopAny, bool described, ncclGinDescriptorSmem*,
                          cuda::thread_scope given, cuda::thread_scope needed, uint32_t flags, ncclGinSegmentType_t) {
  expect_call(
      is_all(*gin, team) && !counts && !described && is_fenced(given, needed) && flags == ncclGinOptFlagsDefault,
      "ncclGinPut_v3");
  GinQueue::Task task{at(*gin, from, from_offset), at(*gin, to, to_offset, peer), std::vector<char>(bytes)};
  if (type == NCCL_GIN_SIGNAL_TYPE_VA) task.word = reinterpret_cast<uint64_t*>(at(*gin, signal, signal_offset, peer));
  task.strong = strong;
  ask(gin, peer, std::move(task));
}
inline void ncclGinPutValue_v3(ncclGin_C* gin, ncclTeam team, int peer, ncclWindow_t to, size_t offset,
                               unsigned long value, size_t bytes, ncclGinSignalType type, ncclWindow_t, size_t,
                               ncclGinSignal_t, bool, ncclGinSignalOp_t, unsigned long, ncclCoopAny, bool described,
                               ncclGinDescriptorSmem*, cuda::thread_scope given, cuda::thread_scope needed,
                               uint32_t flags) {
  expect_call(is_all(*gin, team) && type == NCCL_GIN_SIGNAL_TYPE_NONE && !described && is_fenced(given, needed) &&
                  flags == ncclGinOptFlagsDefault,
              "ncclGinPutValue_v3");
  const auto* const begin = reinterpret_cast<const char*>(&value);
  ask(gin, peer, {nullptr, at(*gin, to, offset, peer), std::vector<char>(begin, begin + bytes)});
}
inline void ncclGinSignal_v3(ncclGin_C* gin, ncclTeam team, int peer, ncclGinSignalType type, ncclWindow_t window,
                             size_t offset, ncclGinSignal_t, bool strong, ncclGinSignalOp_t, unsigned long, ncclCoopAny,
                             bool described, ncclGinDescriptorSmem*, cuda::thread_scope given,
                             cuda::thread_scope needed, uint32_t flags) {
  expect_call(is_all(*gin, team) && type == NCCL_GIN_SIGNAL_TYPE_VA && !described && is_fenced(given, needed) &&
                  flags == ncclGinOptFlagsDefault,
              "ncclGinSignal_v3");
  GinQueue::Task task{};
  task.word = reinterpret_cast<uint64_t*>(at(*gin, window, offset, peer));
  task.settled = true;
  task.strong = strong;
  ask(gin, peer, std::move(task));
}
inline void ncclGinFlush(ncclGin_C* gin, ncclCoopAny, Order order) {
  expect_call(order == moe_rt::kAcquire, "ncclGinFlush");
  for (int peer = 0; peer < gin->comm.nRanks; ++peer) {
    GinCards::all().with(*gin, peer, [](GinQueue& queue) { queue.complete(); });
  }
}
inline void ncclGinFlushAsync(ncclGin_C* gin, ncclTeam team, uint32_t peer, ncclGinRequest_t* request, ncclCoopAny,
                              uint32_t flags, bool described, ncclGinDescriptorSmem*) {
  expect_call(is_all(*gin, team) && !described && flags == ncclGinOptFlagsDefault, "ncclGinFlushAsync");
  request->peer = int(peer);
}
inline void ncclGinWait(ncclGin_C* gin, ncclGinRequest_t* request, ncclCoopAny, bool described, ncclGinDescriptorSmem*,
                        Order order) {
  expect_call(!described && order == moe_rt::kAcquire, "ncclGinWait");
  GinCards::all().with(*gin, request->peer, [](GinQueue& queue) { queue.complete(); });
}
