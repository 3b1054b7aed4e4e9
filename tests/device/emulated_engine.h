// A rank of the emulated GPU with the calls of the CPU engine, so that the stress program can drive either. Sizes are
// constants, as the just-in-time compiler makes them.
#pragma once

#include <memory>
#include <stdexcept>

#include "../../cuda/host/engine.h"
#include "emulation.h"

namespace moe_rt::emulation {

template <int kHidden, int kTopk>
class Engine {
 public:
  using Dims = FixedDims<kHidden, kTopk>;
  static constexpr int kBlocks = 3;  // of a launch that moves rows; routing has its own

  explicit Engine(EngineConfig config)
      : config_(std::move(config)), placement_(PlacementTables::make(config_.expert_rank, config_.shape.num_ranks)) {
    for (const uint64_t segment : config_.segments) base_.push_back(reinterpret_cast<char*>(segment));
    world_ = {
        config_.shape, Layout::make(config_.shape), placement_.view(), config_.capacity.data(), base_.data(), nullptr,
        config_.rank,  config_.config_hash};
    state_.bad_entry = kNoBadEntry;
    control_ = {&state_, &record_, int64_t(config_.timeout_s * 1e9), 0, 1};
    noise_.seed(static_cast<uint32_t>(config_.rank) + 1);
  }

  Status dispatch(const DispatchArgs& args, uint32_t tag) {
    return run("dispatch_send", "dispatch_receive", &args, tag, config_.shape.num_ranks);
  }
  Status combine(const CombineArgs& args, uint32_t tag) {
    return run("combine_send", "combine_receive", &args, tag, 0);
  }
  Status combine_backward(const CombineBackwardArgs& args, uint32_t tag) {
    return run("combine_backward_send", "combine_backward_receive", &args, tag, 0);
  }

 private:
  Status run(const char* send, const char* receive, const void* args, uint32_t tag, int routing) {
    control_.tag = tag;
    launch_one(send, args, routing + kBlocks);
    launch_one(receive, args, kBlocks);
    return load_acquire(record_.reported) ? record_.status : Status{};
  }
  void launch_one(const char* kernel, const void* args, int blocks) {
    const int64_t bytes = scratch_bytes(world_, config_.num_lanes);
    launch(MappedLinks{}, blocks, config_.num_lanes, bytes, static_cast<uint32_t>(noise_()), [&](const auto& m) {
      if (!run_body<Dims, F32>(kernel, m, Dims{}, world_, control_, args)) throw std::logic_error(kernel);
    });
  }

  EngineConfig config_;
  PlacementTables placement_;
  std::vector<char*> base_;
  World world_{};
  DeviceState state_{};
  HostRecord record_{};
  Control control_{};
  std::mt19937 noise_;
};

}  // namespace moe_rt::emulation
