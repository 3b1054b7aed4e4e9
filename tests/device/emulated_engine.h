// A rank of the emulated GPU with the interface of the CPU engine, so that the stress program can drive either. Sizes
// are constants, as in just-in-time compiled code.
#pragma once

#include <memory>
#include <new>
#include <stdexcept>

#include "../../cuda/cpu/engine.h"
#include "../../cuda/cpu/world_tables.h"
#include "emulated_network.h"

namespace moe_rt::emulation {

template <int kHidden, int kTopk>
class Engine {
 public:
  template <Sums kSums>
  using Dims = FixedDims<kHidden, kTopk, Codec::kRaw, Codec::kRaw, kSums>;
#if defined(MOE_RT_EMULATED_NETWORK)
  // No peer's segment is mapped.
  static constexpr bool kNetwork = true;
  using Links = RdmaLinks<Network>;
#else
  static constexpr bool kNetwork = false;
  using Links = MappedLinks;
#endif
  static constexpr int kBlocks = 3;              // in a launch that moves rows
  static constexpr int kBlocksWithRouters = 16;  // in dispatch_send: two of them route

  explicit Engine(EngineConfig config)
      : config_(std::move(config)),
        nodes_(config_.node_of, config_.rank),
        placement_(PlacementTables::make(config_.expert_rank, config_.shape.num_ranks)) {
    for (const uint64_t segment : config_.segments) base_.push_back(reinterpret_cast<char*>(segment));
    if constexpr (kNetwork) connect();
    world_ = {.shape = config_.shape,
              .layout = Layout::make(config_.shape),
              .placement = placement_.view(),
              .base = base_.data(),
              .mirror = kNetwork ? mirror_.data() : nullptr,
              .rank = config_.rank,
              .config = config_.config_hash,
              .plan_mark = new_plan_mark(),
              .nodes = config_.node_of.empty() ? Nodes{} : nodes_.view()};
    state_.seq[0] = state_.seq[1] = config_.first_seq - 1;
    state_.bad_entry = kNoBadEntry;
    control_ = {.state = &state_,
                .record = &record_,
                .timeout_ns = int64_t(config_.timeout_s * 1e9),
                .tag = 0,
                .may_overflow = 1};
    noise_.seed(static_cast<uint32_t>(config_.rank) + 1);
    whole_ = !kNetwork && config_.shape.num_max_tokens <= whole_tokens(config_.shape);
  }

#if defined(MOE_RT_EMULATED_NETWORK)
  ~Engine() { Cards::all().drain(); }
#endif

  Status dispatch(const DispatchArgs& args, uint32_t tag) {
    if (whole_) return run_whole("dispatch_whole", &args, tag);
    return run("dispatch_send", "dispatch_forward", "dispatch_receive", &args, tag);
  }
  Status combine(const CombineArgs& args, uint32_t tag) {
    if (whole_) return run_whole("combine_whole", &args, tag);
    return run("combine_send", "combine_forward", "combine_receive", &args, tag);
  }
  Status combine_backward(const CombineBackwardArgs& args, uint32_t tag) {
    return run("combine_backward_send", "combine_backward_forward", "combine_backward_receive", &args, tag);
  }

 private:
  Status run(const char* send, const char* forward, const char* receive, const void* args, uint32_t tag) {
    control_.tag = tag;
    const bool routes = std::strcmp(send, "dispatch_send") == 0, two_level = world_.shape.two_level();
    launch_one(send, args, routes ? kBlocksWithRouters : kBlocks);
    if (kNetwork && routes) launch_one(two_level ? "dispatch_lists" : "dispatch_fetch", args, 2);
    if (two_level) launch_one(forward, args, kBlocks);
    launch_one(receive, args, kBlocks);
    return outcome();
  }
  Status run_whole(const char* kernel, const void* args, uint32_t tag) {
    control_.tag = tag;
    launch_one(kernel, args, 1);
    return outcome();
  }
  Status outcome() const { return load_acquire(record_.reported) ? record_.status : Status{}; }
  void launch_one(const char* kernel, const void* args, int blocks) {
    const auto launch_over = [&](const auto& links) {
      const int64_t bytes = scratch_bytes(world_, config_.num_lanes);
      launch(links, blocks, config_.num_lanes, bytes, static_cast<uint32_t>(noise_()), nullptr, [&](const auto& m) {
        const auto run = [&](auto dims) {
          if (!run_body<decltype(dims), F32>(kernel, m, dims, world_, control_, args)) throw std::logic_error(kernel);
        };
        world_.shape.returns_entries() ? run(Dims<Sums::kInvariant>{}) : run(Dims<Sums::kRanked>{});
      });
    };
#if defined(MOE_RT_EMULATED_NETWORK)
    if (world_.shape.two_level()) return launch_over(NodeLinks<Network>{links_.memory, links_.net});
#endif
    launch_over(links_);
  }

  void connect() {
    const Shape& shape = config_.shape;
    const NetworkLayout n = NetworkLayout::make(shape, int64_t{kBlocksWithRouters} * config_.num_lanes);
    // Allocate the exact size, so that a sanitizer reports the first byte out of bounds.
    char* const memory = new (std::align_val_t{kPage}) char[n.bytes]();
    network_.reset(memory);
    segments_ = base_;
    mirror_.resize(shape.num_ranks);
    const bool two_level = shape.two_level();
    for (int r = 0; r < shape.num_ranks; ++r) {
      if (two_level ? config_.node_of[r] == nodes_.own() : r == config_.rank) continue;
      base_[r] = nullptr;
      mirror_[r] = two_level ? staged(r) : memory + n.mirrors + r * n.mirror_bytes;
    }
#if defined(MOE_RT_EMULATED_NETWORK)
    char* const mine = segments_[config_.rank];
    links_ = {{mine, reinterpret_cast<Header*>(memory), memory + n.staging, n.warp_bytes}, {segments_.data(), mine}};
#endif
  }

  // Return the address of an unmapped rank's lists, in the segment of its proxy.
  char* staged(int remote) const {
    const Layout::Staged s = Layout::make(config_.shape).staged;
    return segments_[nodes_.proxies()[remote]] + s.lists + nodes_.client_index()[remote] * s.bytes;
  }

  EngineConfig config_;
  NodeTables nodes_;
  struct Aligned {
    void operator()(char* memory) const { operator delete[](memory, std::align_val_t{kPage}); }
  };
  std::unique_ptr<char[], Aligned> network_;
  std::vector<char*> segments_, mirror_;
  Links links_{};
  PlacementTables placement_;
  std::vector<char*> base_;
  World world_{};
  DeviceState state_{};
  HostRecord record_{};
  Control control_{};
  std::mt19937 noise_;
  bool whole_ = false;  // chosen as in Launcher
};

}  // namespace moe_rt::emulation
