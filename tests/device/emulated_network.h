// A network for the emulated GPU: peers' segments are out of reach but through it, and what is put arrives late.
#pragma once

#include <functional>

#include "../../cuda/device/rdma.h"
#include "emulation.h"

namespace moe_rt::emulation {

// Puts wait until their lane calls quiet: a role that forgets to flush before the signal is found out. A signal goes at
// once, with what is put along with it.
struct Network {
  char* const* segments;  // [R] where each rank's segment really is
  char* mine;             // the own one: remote places are named by it

  template <class T>
  T* there(T* place, int peer) const {
    const auto at = reinterpret_cast<const char*>(place);
    return reinterpret_cast<T*>(const_cast<char*>(segments[peer] + (at - mine)));
  }
  void get(const Warp&, void* here, const char* place, int64_t bytes, int peer) const {
    std::memcpy(here, there(place, peer), static_cast<size_t>(bytes));
  }
  void get(const Block& block, void* here, const char* place, int64_t bytes, int peer) const {
    if (block.rank() == 0) std::memcpy(here, there(place, peer), static_cast<size_t>(bytes));
  }
  void put(const Warp&, char* place, const char* here, int64_t bytes, int peer) const {
    pending().push_back([to = there(place, peer), row = std::vector<char>(here, here + bytes)] {
      std::memcpy(to, row.data(), row.size());
    });
  }
  template <class T>
  void put_value(T* place, T value, int peer) const {
    pending().push_back([to = there(place, peer), value] { store_relaxed(*to, value); });
  }
  void put_signal(Header* place, const Header* here, uint64_t* signal, uint64_t seq, int peer) const {
    *there(place, peer) = *here;
    store_release(*there(signal, peer), seq);
  }
  void replace(uint64_t* place, uint64_t expected, uint64_t value, int peer) const {
    replace_acq_rel(*there(place, peer), expected, value);
  }
  void quiet() const {
    for (const auto& put : pending()) put();
    pending().clear();
  }

 private:
  static std::vector<std::function<void()>>& pending() {
    thread_local std::vector<std::function<void()>> puts;
    return puts;
  }
};

}  // namespace moe_rt::emulation
