// Network of copies between ranks that map each other: it exercises two levels on one GPU, or one host.
#pragma once

#include "machine.h"
#include "moving.h"
#include "scaled_rows.h"

namespace moe_rt {

struct MappedNet {
  static constexpr bool kOrderedSignals = true;
  char* const* segments;  // [R] address of each rank's segment
  char* mine;             // this rank's segment, whose addresses name remote places

  __device__ void get(const WarpGroup& group, void* here, const void* there, int64_t bytes, int pe) const {
    copy(group, static_cast<char*>(here), at(static_cast<const char*>(there), pe), bytes);
  }
  __device__ void get(const BlockCoop& block, void* here, const void* there, int64_t bytes, int pe) const {
    copy(BlockLanes{block}, static_cast<char*>(here), at(static_cast<const char*>(there), pe), bytes);
  }
  __device__ void put(const WarpGroup& group, void* there, const void* here, int64_t bytes, int pe) const {
    copy(group, at(static_cast<char*>(there), pe), static_cast<const char*>(here), bytes);
  }
  template <class T>
  __device__ void put_value(T* there, T value, int pe) const {
    store_relaxed(*at(there, pe), value);
  }
  __device__ void put_signal(Header* there, const Header* here, uint64_t* signal, uint64_t seq, int pe) const {
    *at(there, pe) = *here;
    store_release(*at(signal, pe), seq);
  }
  __device__ void poison(uint64_t* there, uint64_t word, int pe) const {
    replace_acq_rel(*at(there, pe), uint64_t{0}, word);
  }
  __device__ void mark(uint64_t* there, int pe) const { store_release(*at(there, pe), uint64_t{1}); }
  __device__ void before_signals() const {}
  __device__ void quiet() const {}
  __device__ void fence() const {}

 private:
  struct BlockLanes {
    BlockCoop block;
    __device__ int lane() const { return block.rank(); }
    __device__ int lanes() const { return block.size(); }
  };
  template <class T>
  __device__ T* at(T* place, int pe) const {
    return reinterpret_cast<T*>(segments[pe] + (reinterpret_cast<const char*>(place) - mine));
  }
  // Copies in the widest vectors that divide both addresses and the size.
  template <class Group>
  __device__ static void copy(const Group& group, char* to, const char* from, int64_t bytes) {
    const auto places = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | uint64_t(bytes);
    const auto move = [&](auto vector) {
      move_vectors<decltype(vector)>(group, int(bytes / int64_t{sizeof(vector)}), from, [&](auto&& put) { put(to); });
    };
    if (places % 16 == 0) {
      move(FourWords{});
    } else if (places % 4 == 0) {
      move(uint32_t{});
    } else {
      move(char{});
    }
  }
};

}  // namespace moe_rt
