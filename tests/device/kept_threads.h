// Threads that are reused for the lanes of launches: starting one takes ten times as long as waking one.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace moe_rt::emulation {

// One per launching thread. A lane synchronises only with the launching thread, at its start and its end: any further
// order between lanes or launching threads would hide their races.
class KeptThreads {
 public:
  static KeptThreads& mine() {
    thread_local KeptThreads kept;
    return kept;
  }
  void start(std::function<void()> work) {
    if (busy_ == lanes_.size()) lanes_.emplace_back();
    lanes_[busy_++].begin(std::move(work));
  }
  // Return when everything that was started has ended.
  void await() {
    for (size_t i = 0; i < busy_; ++i) lanes_[i].await();
    busy_ = 0;
  }

 private:
  class Lane {
   public:
    Lane() : thread_([this] { run(); }) {}
    ~Lane() {
      begin(nullptr);
      thread_.join();
    }
    void begin(std::function<void()> work) {
      const std::lock_guard lock(mutex_);
      work_ = std::move(work);
      begun_ = true;
      changed_.notify_one();
    }
    void await() {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !begun_; });
    }

   private:
    void run() {
      std::unique_lock lock(mutex_);
      while (true) {
        changed_.wait(lock, [this] { return begun_; });
        if (!work_) return;
        lock.unlock();
        work_();
        lock.lock();
        begun_ = false;
        changed_.notify_one();
      }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> work_;
    bool begun_ = false;
    std::thread thread_;  // last, because it uses the other members
  };

  std::deque<Lane> lanes_;
  size_t busy_ = 0;
};

}  // namespace moe_rt::emulation
