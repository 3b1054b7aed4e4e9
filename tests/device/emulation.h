// A GPU of host threads: runs the bodies of CUDA launches with all their blocks, for sanitizers and the whole test
// suite.
//
// A launch's blocks run in parallel, or sequentially in random order: no block may wait for another block of its
// launch, so both must work. Lanes pause at random barriers. A warp has 32 lanes if they divide a block, else one.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <semaphore>
#include <thread>
#include <vector>

#include "../../cuda/cpu/team.h"
#include "../../cuda/gpu/forwarding.h"
#include "../../cuda/gpu/whole_ops.h"
#include "kept_threads.h"

namespace moe_rt::emulation {

struct Block {
  int rank_, size_;
  Barrier* barrier;
  uint32_t* noise;
  int rank() const { return rank_; }
  int size() const { return size_; }
  bool leader() const { return true; }
  void sync() const {
    *noise = *noise * 1664525u + 1013904223u;
    if (*noise >> 29 == 0) std::this_thread::yield();
    if (*noise >> 22 == 1) std::this_thread::sleep_for(std::chrono::microseconds(*noise % 300));
    barrier->wait();
  }
};

// Lanes outnumber the cores by far: waiting lanes must leave the cores to the lanes they wait for.
inline constexpr int kYields = 4;

// The barrier and exchange of one warp. A warp of one lane needs none.
struct WarpState {
  explicit WarpState(int lanes) : barrier(lanes, kYields), words(lanes) {}
  Barrier barrier;
  std::vector<double> words;
};

// Collective operations of a warp; all its lanes must call them together, as on a GPU.
template <int kLanes>
struct WarpLane {
  static constexpr int kTeamLanes = kLanes;
  int lane_ = 0;
  WarpState* state = nullptr;
  void sync() const {
    if constexpr (kLanes > 1) state->barrier.wait();
  }
  int team_lane() const { return lane_; }
  // Return the word of lane `from`, and hand over this lane's.
  template <class T>
  T exchange(T x, int from) const {
    state->words[lane_] = static_cast<double>(x);
    sync();
    const auto other = static_cast<T>(state->words[from]);
    sync();
    return other;
  }
  template <int kNeighbours>
  uint32_t team_max(uint32_t x) const {
    for (int mask = kNeighbours / 2; mask > 0; mask /= 2) x = std::max(x, exchange(x, lane_ ^ mask));
    return x;
  }
  template <class T>
  T sum(T x) const {
    for (int mask = kLanes / 2; mask > 0; mask /= 2) x += exchange(x, lane_ ^ mask);
    return x;
  }
};

template <int kLanes>
struct Warp : WarpLane<kLanes> {
  int64_t index, count;
  Warp(int64_t i, int64_t n, WarpLane<kLanes> lane = {}) : WarpLane<kLanes>(lane), index(i), count(n) {}
  Range share(int64_t n) const { return {index, n, count}; }
  bool leader() const { return this->lane_ == 0; }
  int lane() const { return this->lane_; }
  static constexpr int lanes() { return kLanes; }
  int team() const { return 0; }
  int teams() const { return 1; }
};

// Several warps of a block that share one row.
template <int kLanes>
struct WarpsGroup : WarpLane<kLanes> {
  int64_t index, count;
  int rank, size;
  WarpsGroup(int64_t i, int64_t n, int r, int s, WarpLane<kLanes> lane)
      : WarpLane<kLanes>(lane), index(i), count(n), rank(r), size(s) {}
  Range share(int64_t n) const { return {index, n, count}; }
  bool leader() const { return rank == 0; }
  int lane() const { return rank; }
  int lanes() const { return size; }
  int team() const { return rank / kLanes; }
  int teams() const { return size / kLanes; }
};

// The number of blocks that a GPU runs concurrently, over all launches. A block without a place waits for one to end.
class Room {
 public:
  explicit Room(int blocks) : places_(blocks) {}
  void enter() { places_.acquire(); }
  void leave() { places_.release(); }

 private:
  std::counting_semaphore<> places_;
};

template <class Links, int kWarpLanes = 1>
struct Machine {
  static constexpr bool kWarpsOnly = Links::kWarpsOnly, kTwoLevel = Links::kTwoLevel;
  static constexpr bool kOrderedSignals = Links::kOrderedSignals;
  static constexpr int kLanes = kWarpLanes;
  const Links& links;
  Block block_;
  WarpState* warp_;
  int index, count;
  BlockShared& shared_;
  int32_t* scratch_;

  Block block() const { return block_; }
  BlockShared& shared() const { return shared_; }
  int32_t* scratch() const { return scratch_; }
  int num_blocks() const { return count; }
  int block_index() const { return index; }
  int64_t clock_ns() const { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
  void let_next_begin() const {}
  void await_launch_before() const {}  // launches run sequentially here
  void nap() const { std::this_thread::sleep_for(std::chrono::microseconds(10)); }
  Warp<kWarpLanes> warps(int first) const {
    const int64_t blocks = count - first, each = block_.size_ / kWarpLanes;
    return {block_.rank_ / kWarpLanes * blocks + index - first, each * blocks, warp_lane()};
  }
  WarpsGroup<kWarpLanes> warps(int first, int together) const {
    const int64_t blocks = count - first, lanes = together * kWarpLanes;
    return {block_.rank_ / lanes * blocks + index - first, block_.size_ / lanes * blocks,
            static_cast<int>(block_.rank_ % lanes), static_cast<int>(lanes), warp_lane()};
  }
  WarpLane<kWarpLanes> warp_lane() const { return {block_.rank_ % kWarpLanes, warp_}; }
  auto link() const { return links.link(); }
  template <class Group>
  auto link(const Group& group) const {
    return links.link(group);
  }
};

struct MappedLinks {
  static constexpr bool kWarpsOnly = false, kTwoLevel = false, kOrderedSignals = true;
  MappedLink link() const { return {}; }
  template <class Group>
  MappedLink link(const Group&) const {
    return {};
  }
};

// Call body(machine) on every lane of every block and return when all are done. Blocks start when `room` has a place.
template <int kWarpLanes = 1, class Links, class Body>
void launch(const Links& links, int blocks, int threads, int64_t shared_bytes, uint32_t seed, Room* room, Body&& body) {
  std::mt19937 random(seed);
  const bool side_by_side = random() % 2 == 0;
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  struct State {
    State(int size, int64_t bytes) : barrier(size, kYields), scratch(bytes / 4 + 1, -1) {
      for (int i = 0; i < size / kWarpLanes; ++i) warps.emplace_back(kWarpLanes);
    }
    Barrier barrier;
    uint32_t done = 0;  // lanes
    std::deque<WarpState> warps;
    BlockShared shared{};
    std::vector<int32_t> scratch;
  };
  std::vector<std::unique_ptr<State>> states;
  KeptThreads& lanes = KeptThreads::mine();
  for (const int index : order) {
    if (room) room->enter();
    State& state = *states.emplace_back(std::make_unique<State>(threads, shared_bytes));
    for (int lane = 0; lane < threads; ++lane) {
      lanes.start([&, index, lane, noise = static_cast<uint32_t>(random())]() mutable {
        const Block block{lane, threads, &state.barrier, &noise};
        WarpState* const warp = &state.warps[lane / kWarpLanes];
        body(Machine<Links, kWarpLanes>{links, block, warp, index, blocks, state.shared, state.scratch.data()});
        if (fetch_add_acq_rel(state.done, 1u) + 1 == static_cast<uint32_t>(threads) && room) room->leave();
      });
    }
    if (!side_by_side) lanes.await();
  }
  lanes.await();
}

// Run the body of the named kernel.
template <class Dims, class Elem, class Links, int kWarpLanes>
bool run_body(const char* kernel, const Machine<Links, kWarpLanes>& m, const Dims& dims, const World& w,
              const Control& c, const void* args) {
  const Launch<Dims, Elem, Machine<Links, kWarpLanes>> launch{m, dims, w, c};
  const auto& dispatch = *static_cast<const DispatchArgs*>(args);
  const auto& combine = *static_cast<const CombineArgs*>(args);
  const auto& backward = *static_cast<const CombineBackwardArgs*>(args);
  const auto& end = *static_cast<const EndArgs*>(args);
  const auto is = [kernel](const char* name) { return std::strcmp(kernel, name) == 0; };
  if constexpr (Links::kTwoLevel) {
    const Forwarding forwarding{launch};
    if (is("dispatch_lists")) return forwarding.dispatch_lists(dispatch), true;
    if (is("dispatch_forward")) return forwarding.dispatch_forward(dispatch), true;
    if (is("combine_first_wait")) return forwarding.combine_first_wait(combine), true;
    if (is("combine_forward")) return forwarding.combine_forward(combine), true;
    if (is("combine_backward_first_wait")) return forwarding.combine_backward_first_wait(backward), true;
    if (is("combine_backward_forward")) return forwarding.combine_backward_forward(backward), true;
  } else if constexpr (Links::kWarpsOnly) {
    if (is("dispatch_fetch")) return fetch_lists(launch, dispatch), true;
  } else {
    if (is("dispatch_whole")) return dispatch_whole(launch, dispatch), true;
    if (is("combine_whole")) return combine_whole(launch, combine), true;
  }
  if (is("dispatch_send")) return launch.dispatch_send(dispatch), true;
  if (is("dispatch_wait")) return launch.dispatch_wait(dispatch), true;
  if (is("dispatch_receive")) return launch.dispatch_receive(dispatch), true;
  if (is("combine_send")) return launch.combine_send(combine), true;
  if (is("combine_wait")) return launch.combine_wait(combine), true;
  if (is("combine_receive")) return launch.combine_receive(combine), true;
  if (is("combine_backward_send")) return launch.combine_backward_send(backward), true;
  if (is("combine_backward_wait")) return launch.combine_backward_wait(backward), true;
  if (is("combine_backward_receive")) return launch.combine_backward_receive(backward), true;
  if (is("abort_group")) return launch.abort_group(end), true;
  if (is("leave")) return launch.leave(end), true;
  return false;
}

}  // namespace moe_rt::emulation
