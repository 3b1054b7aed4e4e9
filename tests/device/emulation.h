// A GPU of host threads: runs the CUDA launch bodies, blocks and all, so that sanitizers and the whole suite can see
// them.
//
// A launch's blocks run side by side, or one after another in random order: no block may wait for another of its
// launch, so either must do. Lanes pause at random barriers. A warp is one lane here; a block's lanes share a row.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../../cuda/device/ops.h"
#include "../../cuda/host/team.h"

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

struct Warp {
  static constexpr int kTeamLanes = 1;
  int64_t index, count;
  Range share(int64_t n) const { return {index, n, count}; }
  bool leader() const { return true; }
  void sync() const {}
  int lane() const { return 0; }
  int lanes() const { return 1; }
  int team() const { return 0; }
  int teams() const { return 1; }
  int team_lane() const { return 0; }
  uint32_t team_max(uint32_t x) const { return x; }
  template <class T>
  T sum(T x) const {
    return x;
  }
};

struct BlockGroup {
  static constexpr int kTeamLanes = 1;
  int64_t index, count;
  int lane_, lanes_;
  Range share(int64_t n) const { return {index, n, count}; }
  bool leader() const { return lane_ == 0; }
  int lane() const { return lane_; }
  int lanes() const { return lanes_; }
  int team() const { return lane_; }
  int teams() const { return lanes_; }
  int team_lane() const { return 0; }
  uint32_t team_max(uint32_t x) const { return x; }
};

template <class Links>
struct Machine {
  static constexpr bool kWarpsOnly = Links::kWarpsOnly;
  const Links& links;
  Block block_;
  int index, count;
  BlockShared& shared_;
  int32_t* scratch_;

  Block block() const { return block_; }
  BlockShared& shared() const { return shared_; }
  int32_t* scratch() const { return scratch_; }
  int num_blocks() const { return count; }
  int block_index() const { return index; }
  int64_t clock_ns() const { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
  void nap() const { sched_yield(); }
  Warp warps(int first) const {
    return {int64_t{index - first} * block_.size_ + block_.rank_, int64_t{count - first} * block_.size_};
  }
  BlockGroup blocks(int first) const { return {index - first, count - first, block_.rank_, block_.size_}; }
  auto link() const { return links.link(); }
  template <class Group>
  auto link(const Group& group) const {
    return links.link(group);
  }
};

struct MappedLinks {
  static constexpr bool kWarpsOnly = false;
  MappedLink link() const { return {}; }
  template <class Group>
  MappedLink link(const Group&) const {
    return {};
  }
};

// Calls body(machine) on every lane of every block and returns when all are done.
template <class Links, class Body>
void launch(const Links& links, int blocks, int threads, int64_t shared_bytes, uint32_t seed, Body&& body) {
  std::mt19937 random(seed);
  const bool side_by_side = random() % 2 == 0;
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  struct State {
    explicit State(int size, int64_t bytes) : barrier(size), scratch(bytes / 4 + 1, -1) {}
    Barrier barrier;
    BlockShared shared{};
    std::vector<int32_t> scratch;
  };
  std::vector<std::unique_ptr<State>> states;
  std::vector<std::thread> lanes;
  for (const int index : order) {
    State& state = *states.emplace_back(std::make_unique<State>(threads, shared_bytes));
    for (int lane = 0; lane < threads; ++lane) {
      lanes.emplace_back([&, index, lane, noise = static_cast<uint32_t>(random())]() mutable {
        const Block block{lane, threads, &state.barrier, &noise};
        body(Machine<Links>{links, block, index, blocks, state.shared, state.scratch.data()});
      });
    }
    if (side_by_side) continue;
    for (std::thread& t : lanes) t.join();
    lanes.clear();
  }
  for (std::thread& t : lanes) t.join();
}

// Runs the body named by a kernel.
template <class Dims, class Elem, class Links>
bool run_body(const char* kernel, const Machine<Links>& m, const Dims& dims, const World& w, const Control& c,
              const void* args) {
  const Launch<Dims, Elem, Machine<Links>> launch{m, dims, w, c};
  const auto& dispatch = *static_cast<const DispatchArgs*>(args);
  const auto& combine = *static_cast<const CombineArgs*>(args);
  const auto& backward = *static_cast<const CombineBackwardArgs*>(args);
  const auto& end = *static_cast<const EndArgs*>(args);
  const auto is = [kernel](const char* name) { return std::strcmp(kernel, name) == 0; };
  if (is("dispatch_send")) return launch.dispatch_send(dispatch), true;
  if (is("dispatch_receive")) return launch.dispatch_receive(dispatch), true;
  if (is("combine_send")) return launch.combine_send(combine), true;
  if (is("combine_receive")) return launch.combine_receive(combine), true;
  if (is("combine_backward_send")) return launch.combine_backward_send(backward), true;
  if (is("combine_backward_receive")) return launch.combine_backward_receive(backward), true;
  if (is("abort_group")) return launch.abort_group(end), true;
  if (is("leave")) return launch.leave(end), true;
  return false;
}

}  // namespace moe_rt::emulation
