// Team of host threads that runs one role together: the coop for several cores per rank, and for race tests.
#pragma once

#include <sched.h>

#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../protocol/core/atomics.h"
#include "../protocol/core/coop.h"

namespace moe_rt {

// Barrier for the lanes of one op. Its wait is bounded because every lane reaches it: only lane 0 ever waits for a
// peer, with a deadline. Meanwhile the other lanes sleep: a late peer may need their core.
class Barrier {
 public:
  // A lane yields `yields` times before it sleeps: the default takes about 100 us on an idle core, ten times as long as
  // waking the lanes.
  explicit Barrier(int size, int yields = 256) : size_(size), yields_(yields) {}
  // SYNC POINT barrier. The last lane's release of generation_ pairs with the others' acquire; arrivals are chained by
  // the read-modify-write. Without it a lane could read scratch that another lane has not finished writing.
  void wait() {
    const uint32_t generation = load_relaxed(generation_);
    if (fetch_add_acq_rel(arrived_, 1u) + 1 == static_cast<uint32_t>(size_)) {
      store_relaxed(arrived_, 0u);
      store_release(generation_, generation + 1);
      wake_sleepers(generation_);
      return;
    }
    for (int yields = 0; yields < yields_; ++yields) {
      if (load_acquire(generation_) != generation) return;
      sched_yield();
    }
    sleep_while(generation_, generation);
  }

 private:
  int size_, yields_;
  uint32_t arrived_ = 0, generation_ = 0;
};

struct TeamCoop {
  int rank_, size_;
  Barrier* barrier;
  int rank() const { return rank_; }
  int size() const { return size_; }
  bool leader() const { return true; }
  void sync() const { barrier->wait(); }
  Range chunk(int64_t n) const { return contiguous_chunk(n, rank_, size_); }
  Range share(int64_t n) const { return chunk(n); }
};

// Threads that sleep between ops; the caller is lane 0.
class Team {
 public:
  // Throws std::system_error, leaving no thread running, if the system grants too few.
  explicit Team(int size) : size_(size), barrier_(size) {
    try {
      for (int lane = 1; lane < size; ++lane) threads_.emplace_back([this, lane] { serve(lane); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs fn(coop) on every lane and returns when all are done.
  template <class Fn>
  void run(Fn& fn) {
    {
      std::lock_guard lock(mutex_);
      job_ = [](void* f, const TeamCoop& coop) { (*static_cast<Fn*>(f))(coop); };
      argument_ = &fn;
      std::fegetenv(&floats_);
      ++round_;
    }
    wake_.notify_all();
    fn(TeamCoop{0, size_, &barrier_});
    barrier_.wait();
  }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void serve(int lane) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (round_ == seen) {
        wake_.wait(lock);
        continue;
      }
      seen = round_;
      const auto job = job_;
      void* const argument = argument_;
      std::fesetenv(&floats_);
      lock.unlock();
      job(argument, TeamCoop{lane, size_, &barrier_});
      barrier_.wait();
      lock.lock();
    }
  }

  int size_;
  Barrier barrier_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*job_)(void*, const TeamCoop&) = nullptr;
  void* argument_ = nullptr;
  std::fenv_t floats_;  // the caller's rounding and denormal modes: bits must not depend on the number of lanes
  uint64_t round_ = 0;
  bool stopping_ = false;
};

}  // namespace moe_rt
