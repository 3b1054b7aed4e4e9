// A network for the emulated GPU: peers' segments are reachable only through it; puts arrive late and in any order.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "../../cuda/gpu/rdma.h"
#include "emulation.h"

namespace moe_rt::emulation {

// Puts that a rank has handed to the network and that have not arrived. They arrive at any time, in any order.
class Card {
 public:
  void hand_over(std::function<void()> arrive, bool signal) {
    std::lock_guard lock(mutex_);
    under_way_.push_back({std::move(arrive), signal});
  }
  void quiet() {
    std::lock_guard lock(mutex_);
    while (!under_way_.empty()) {
      const size_t next = random_() % under_way_.size();
      const bool signal = under_way_[next].signal;
      deliver(next);
      if (signal && !under_way_.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // let peers check
    }
  }
  // Earlier signals arrive before what follows. Rows may not rely on it: their sender waits for them.
  void fence() {
    std::lock_guard lock(mutex_);
    for (size_t i = under_way_.size(); i-- > 0;) {
      if (under_way_[i].signal) deliver(i);
    }
  }
  void deliver_any() {
    std::lock_guard lock(mutex_);
    if (!under_way_.empty()) deliver(random_() % under_way_.size());
  }

 private:
  struct Put {
    std::function<void()> arrive;
    bool signal;
  };
  void deliver(size_t i) {
    under_way_[i].arrive();
    under_way_.erase(under_way_.begin() + i);
  }
  std::mutex mutex_;
  std::vector<Put> under_way_;
  std::mt19937 random_{1};
};

// All cards by the segment of their rank, and a thread that delivers. They live as long as the process.
class Cards {
 public:
  static Cards& all() {
    static Cards* const cards = new Cards;
    return *cards;
  }
  Card& of(const char* segment) {
    std::lock_guard lock(mutex_);
    return cards_[segment];
  }
  // Deliver everything in flight, so that target memory may be freed.
  void drain() {
    std::lock_guard lock(mutex_);
    for (auto& [_, card] : cards_) card.quiet();
  }

 private:
  Cards() {
    std::thread([this] {
      std::mt19937 random{2};
      for (;;) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
        std::lock_guard lock(mutex_);
        for (auto& [_, card] : cards_) {
          if (random() % 32 == 0) card.deliver_any();
        }
      }
    }).detach();
  }
  std::mutex mutex_;
  std::map<const char*, Card> cards_;
};

// A put is guaranteed to arrive only by its sender's quiet. Its source may be reused immediately.
struct Network {
  static constexpr bool kOrderedSignals = true;
  char* const* segments;  // [R] real address of each rank's segment
  char* mine;             // this rank's segment: remote addresses are given relative to it

  template <class T>
  T* there(T* place, int peer) const {
    const auto at = reinterpret_cast<const char*>(place);
    return reinterpret_cast<T*>(const_cast<char*>(segments[peer] + (at - mine)));
  }
  template <class Group>
  void get(const Group& group, void* here, const char* place, int64_t bytes, int peer) const {
    if (leads(group)) std::memcpy(here, there(place, peer), static_cast<size_t>(bytes));
  }
  template <class Group>
  void put(const Group& group, char* place, const char* here, int64_t bytes, int peer) const {
    if (!leads(group)) return;
    hand_over([to = there(place, peer), row = std::vector<char>(here, here + bytes)] {
      std::memcpy(to, row.data(), row.size());
    });
  }
  template <class T>
  void put_value(T* place, T value, int peer) const {
    hand_over([to = there(place, peer), value] { store_relaxed(*to, value); }, std::is_integral_v<T>);
  }
  void put_signal(Header* place, const Header* here, uint64_t* signal, uint64_t seq, int peer) const {
    hand_over(
        [to = there(place, peer), flag = there(signal, peer), seq, header = *here] {
          *to = header;
          store_release(*flag, seq);
        },
        true);
  }
  void poison(uint64_t* place, uint64_t word, int peer) const {
    replace_acq_rel(*there(place, peer), uint64_t{0}, word);
  }
  void mark(uint64_t* place, int peer) const { put_value(place, uint64_t{1}, peer); }
  void before_signals() const { quiet(); }
  void quiet() const { Cards::all().of(mine).quiet(); }
  void fence() const { Cards::all().of(mine).fence(); }

 private:
  static bool leads(const Block& block) { return block.rank() == 0; }
  template <int kLanes>
  static bool leads(const Warp<kLanes>& warp) {
    return warp.leader();
  }
  void hand_over(std::function<void()> arrive, bool signal = false) const {
    Cards::all().of(mine).hand_over(std::move(arrive), signal);
  }
};

}  // namespace moe_rt::emulation
