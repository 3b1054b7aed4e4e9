// Bulk copies of the emulated GPU: each happens as late as allowed, or earlier at random, and a store in two steps.
#pragma once

#include <deque>
#include <map>

#include "../../cuda/gpu/moving.h"
#include "emulation.h"

namespace moe_rt::emulation {

class LateCopies {
 public:
  void open(char* barriers, int) { random_.seed(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(barriers) >> 4)); }
  void load(uint64_t* barrier, char* to, const char* from, int bytes) {
    if (loads_.count(barrier)) throw std::logic_error("a slot is filled before its last load was awaited");
    loads_[barrier] = {to, from, bytes, {}};
    if (random_() % 4 == 0) arrive(loads_[barrier]);
    ++turns_[barrier];
  }
  void await_load(uint64_t* barrier, uint32_t parity) {
    if ((turns_[barrier] - 1) % 2 != parity) throw std::logic_error("a lane waits for another turn of a slot");
    arrive(loads_.at(barrier));
    loads_.erase(barrier);
  }
  void store(char* to, const char* from, int bytes) { open_.push_back({to, from, bytes, {}}); }
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
    if (random_() % 4 == 0) read(groups_.size() - 1);
  }
  template <int kGroups>
  void await_reads() {
    for (size_t i = 0; i + kGroups < groups_.size(); ++i) read(i);
  }
  void await_stores() {
    await_reads<0>();
    while (!groups_.empty()) {
      const size_t next = random_() % groups_.size();
      for (const Copy& copy : groups_[next]) std::memcpy(copy.to, copy.read.data(), copy.bytes);
      groups_.erase(groups_.begin() + static_cast<ptrdiff_t>(next));
    }
  }

 private:
  struct Copy {
    char* to;
    const char* from;
    int bytes;
    std::vector<char> read;  // stores only: the bytes to write
  };
  static void arrive(Copy& copy) {
    if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
    copy.from = nullptr;
  }
  void read(size_t group) {
    for (Copy& copy : groups_[group]) {
      if (copy.read.empty()) copy.read.assign(copy.from, copy.from + copy.bytes);
    }
  }
  std::map<uint64_t*, Copy> loads_;  // by barrier
  std::map<uint64_t*, uint32_t> turns_;
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;
  std::minstd_rand random_;
};

struct RingLinks : MappedLinks {
  RingMemory memory;
  template <class Machine>
  Ring<LateCopies> ring(const Machine& m, int num_topk) const {
    return {memory, num_topk, reinterpret_cast<char*>(m.scratch()), m.block_.rank_ / Machine::kLanes};
  }
};

// Access to mapped peers, by a launch's arguments. The kernels that move rows through rings have a separate library: in
// one library, all tests would wait twice as long for the compiler.
#if defined(MOE_RT_EMULATED_RING)
inline RingLinks mapped_links(void** params) { return {{}, *static_cast<const RingMemory*>(params[2])}; }
#else
inline MappedLinks mapped_links(void**) { return {}; }
#endif

}  // namespace moe_rt::emulation
