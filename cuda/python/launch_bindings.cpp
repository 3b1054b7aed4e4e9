// Part of moe_rt._engine that makes the arguments of ops and CUDA launches: structs by the names of their fields, in
// the bytes that engine and kernels read, so that Python knows no C++ layout.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/world_tables.h"
#include "../gpu/exchange.h"
#include "../gpu/moving.h"
#include "../gpu/sizes.h"
#include "../protocol/core/args.h"
#include "arguments.h"

namespace nb = nanobind;
using namespace moe_rt;

namespace {

void bind_ops(nb::module_& m) {
  m.attr("ANY_CAPACITY") = kAnyCapacity;
  MOE_RT_BIND(m, ScaledArgs, MOE_RT_SCALED_ARGS);
  MOE_RT_BIND(m, DispatchArgs, MOE_RT_DISPATCH_ARGS)
      .def_ro("num_tokens", &DispatchArgs::num_tokens)
      .def_rw("scaled", &DispatchArgs::scaled)
      .def_rw("expert_rows", &DispatchArgs::expert_rows);
  MOE_RT_BIND(m, CombineArgs, MOE_RT_COMBINE_ARGS)
      .def_ro("num_tokens", &CombineArgs::num_tokens)
      .def_prop_rw(
          "topk_weights", [](const CombineArgs& a) { return reinterpret_cast<Address>(a.topk_weights); },
          [](CombineArgs& a, Address weights) { a.topk_weights = at<const void>(weights); });
  MOE_RT_BIND(m, CombineBackwardArgs, MOE_RT_COMBINE_BACKWARD_ARGS)
      .def_ro("num_tokens", &CombineBackwardArgs::num_tokens);
  MOE_RT_BIND(m, EndArgs, MOE_RT_END_ARGS);
  MOE_RT_BIND(m, SwigluArgs, MOE_RT_SWIGLU_ARGS);
  MOE_RT_BIND(m, SwigluBackwardArgs, MOE_RT_SWIGLU_BACKWARD_ARGS);
}

// Fields of a handle's receive plan that Python may read.
void bind_plan(nb::module_& m) {
  nb::class_<RecvPlan> plan(m, "RecvPlan", "Index of each of these fields in the int32 tensor recv_plan.");
  plan.attr("num_pulled") = offsetof(RecvPlan::Head, num_pulled) / sizeof(int32_t);
  plan.attr("num_copies") = offsetof(RecvPlan::Head, num_copies) / sizeof(int32_t);
  plan.attr("num_dropped") = offsetof(RecvPlan::Head, num_dropped) / sizeof(int32_t);
}

// Arguments of every launch in addition to the op's own.
void bind_group(nb::module_& m) {
  nb::class_<Nodes>(m, "Nodes")
      .def("__init__", [](Nodes* self) { new (self) Nodes{}; })
      .def(
          "__init__",
          [](Nodes* self, int own, int num_clients, Address node_of, Address proxy_of, Address client_index,
             Address clients, Address proxy_on) {
            new (self) Nodes{own,
                             num_clients,
                             at<int32_t>(node_of),
                             at<int32_t>(proxy_of),
                             at<int32_t>(client_index),
                             at<int32_t>(clients),
                             at<int32_t>(proxy_on)};
          },
          nb::kw_only(), nb::arg("own"), nb::arg("num_clients"), nb::arg("node_of"), nb::arg("proxy_of"),
          nb::arg("client_index"), nb::arg("clients"), nb::arg("proxy_on"));
  nb::class_<World>(m, "World")
      .def(
          "__init__",
          [](World* self, const Shape& shape, int channel, int rank, uint64_t config_hash, Address position,
             Address owner, Address rank_first, Address entries, Address base, Address mirror, const Nodes& nodes,
             uint64_t plan_mark) {
            new (self) World{.shape = shape,
                             .layout = Layout::of_channel(shape, channel),
                             .placement = {.position = at<int32_t>(position),
                                           .owner = at<int32_t>(owner),
                                           .rank_first = at<int32_t>(rank_first),
                                           .entries = at<int32_t>(entries)},
                             .base = at<char*>(base),
                             .mirror = at<char*>(mirror),
                             .rank = rank,
                             .config = config_hash,
                             .plan_mark = plan_mark,
                             .nodes = nodes};
          },
          nb::kw_only(), nb::arg("shape"), nb::arg("channel"), nb::arg("rank"), nb::arg("config_hash"),
          nb::arg("position"), nb::arg("owner"), nb::arg("rank_first"), nb::arg("entries"), nb::arg("base"),
          nb::arg("mirror"), nb::arg("nodes"), nb::arg("plan_mark"))
      .def_prop_ro("address", [](const World& w) { return reinterpret_cast<Address>(&w); });
  m.def("new_plan_mark", &new_plan_mark);
  MOE_RT_BIND(m, Control, MOE_RT_CONTROL).def_rw("tag", &Control::tag);
}

// The device keeps its selector in its memory; a host that queues all ops itself predicts it with this copy.
void bind_window_selector(nb::module_& m) {
  nb::class_<WindowSelector>(m, "WindowSelector")
      .def("__init__", [](WindowSelector* self) { new (self) WindowSelector{}; })
      .def(
          "next", [](const WindowSelector& s, int op) { return s.next(kind_of(static_cast<Op>(op))); }, nb::arg("op"))
      .def("take", [](WindowSelector& s, int op) { return s.take(kind_of(static_cast<Op>(op))); }, nb::arg("op"));
}

// Sizes and tables that the host prepares.
void bind_sizes(nb::module_& m) {
  nb::class_<PlacementTables>(m, "PlacementTables")
      .def(
          "__init__",
          [](PlacementTables* self, const std::vector<int32_t>& expert_rank, int num_ranks) {
            new (self) PlacementTables(PlacementTables::make(expert_rank, num_ranks));
          },
          nb::arg("expert_rank"), nb::arg("num_ranks"))
      .def_ro("position", &PlacementTables::position)
      .def_ro("owner", &PlacementTables::owner)
      .def_ro("rank_first", &PlacementTables::rank_first)
      .def_ro("entries", &PlacementTables::entries);
  nb::class_<NodeTables>(m, "NodeTables")
      .def(nb::init<const std::vector<int32_t>&, int>(), nb::arg("node_of"), nb::arg("rank"))
      .def_prop_ro("clients", &NodeTables::clients)
      .def_prop_ro("proxies", &NodeTables::proxies)
      .def_prop_ro("client_index", &NodeTables::client_index)
      .def_prop_ro("proxy_on", &NodeTables::proxy_on);
  nb::class_<RingMemory>(m, "RingMemory")
      .def(
          "__init__",
          [](RingMemory* self, int64_t scratch_bytes, int64_t block_bytes, int32_t warps, int32_t num_topk) {
            new (self) RingMemory(RingMemory::make(scratch_bytes, block_bytes, warps, num_topk));
          },
          nb::kw_only(), nb::arg("scratch_bytes"), nb::arg("block_bytes"), nb::arg("warps"), nb::arg("num_topk"))
      .def_ro("at", &RingMemory::at)
      .def_ro("bytes", &RingMemory::bytes)
      .def_ro("piece", &RingMemory::piece)
      .def_prop_ro("address", [](const RingMemory& ring) { return reinterpret_cast<Address>(&ring); });
  m.attr("RING_LOADS") = kRingLoads;
  m.attr("MAX_SCRATCH_BYTES") = kScratchBytes;
  m.attr("WHOLE_TOKENS") = kWholeTokens;
  m.def("whole_tokens", whole_tokens, nb::arg("shape"));
  m.def(
      "scratch_bytes",
      [](const Shape& shape, const std::vector<int32_t>& expert_rank, int rank, int threads) {
        const PlacementTables t = PlacementTables::make(expert_rank, shape.num_ranks);
        World w{};
        w.shape = shape, w.rank = rank, w.placement = t.view();
        return scratch_bytes(w, threads);
      },
      nb::arg("shape"), nb::arg("expert_rank"), nb::arg("rank"), nb::arg("threads"));
}

// The driver's cuLaunchKernel, found at run time: this module is neither built with CUDA nor linked with it.
using LaunchKernel = int (*)(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                             unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                             void* stream, void** params, void** extra);

// The driver's cuLaunchKernelEx, which also takes launch attributes.
struct LaunchAttribute {
  uint32_t id, unused;
  union {
    int allowed;
    char bytes[64];
  } value;
};
struct LaunchConfig {
  unsigned blocks_x, blocks_y, blocks_z, threads_x, threads_y, threads_z, shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};
using LaunchKernelEx = int (*)(const LaunchConfig* config, void* function, void** params, void** extra);
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "cuda.h's layout");

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the launch may begin before the previous launch in the stream
// has ended; its kernel waits for that end itself.
constexpr LaunchAttribute kMayBeginEarly{.id = 6, .unused = 0, .value = {.allowed = 1}};

// Queues kernels, each given by a function, its blocks and the shared memory of each, until the driver refuses one.
// Returns the number queued and the driver's error for the next. All but the first may begin early if launch_kernel_ex
// is given. The GIL is released, since a full queue waits for the device, which may wait for a peer that needs Python.
std::pair<int, int> launch(Address launch_kernel, Address launch_kernel_ex,
                           const std::vector<std::tuple<Address, unsigned, unsigned>>& grids, unsigned threads,
                           Address stream, Address params) {
  const nb::gil_scoped_release released;
  const auto call = reinterpret_cast<LaunchKernel>(launch_kernel);
  const auto call_ex = reinterpret_cast<LaunchKernelEx>(launch_kernel_ex);
  int queued = 0;
  for (const auto& [function, blocks, shared_bytes] : grids) {
    int refused;
    if (queued == 0 || !call_ex) {
      refused = call(at<void>(function), blocks, 1, 1, threads, 1, 1, shared_bytes, at<void>(stream), at<void*>(params),
                     nullptr);
    } else {
      const LaunchConfig config{blocks, 1, 1, threads, 1, 1, shared_bytes, at<void>(stream), &kMayBeginEarly, 1};
      refused = call_ex(&config, at<void>(function), at<void*>(params), nullptr);
    }
    if (refused != 0) return {queued, refused};
    ++queued;
  }
  return {queued, 0};
}

// RdmaLinks and NodeLinks of the kernels. Their Net is an empty struct, that of mapped_net.h, or that of gin_net.h.
struct MappedNet {
  char* const* segments;
  char* mine;
};
struct Links {
  NetworkMemory memory;
  union {
    MappedNet mapped;
    GinHandles gin;
  };
};

// Arguments by which a launch reaches unmapped peers.
void bind_links(nb::module_& m) {
  nb::class_<Links>(m, "Links")
      .def(
          "__init__",
          [](Links* self, Address segment, Address outbox, Address staging, int64_t warp_bytes, Address segments) {
            new (self) Links{.memory = {.segment = at<char>(segment),
                                        .outbox = at<Header>(outbox),
                                        .staging = at<char>(staging),
                                        .warp_bytes = warp_bytes},
                             .mapped = {.segments = at<char*>(segments), .mine = at<char>(segment)}};
          },
          nb::kw_only(), nb::arg("segment") = 0, nb::arg("outbox") = 0, nb::arg("staging") = 0,
          nb::arg("warp_bytes") = 0, nb::arg("segments") = 0)
      .def(
          "over_gin",
          [](Links& links, Address communicator, Address segment_window, Address memory_window, int64_t segment_bytes) {
            links.gin = {.comm = at<void>(communicator),
                         .segment_window = at<void>(segment_window),
                         .memory_window = at<void>(memory_window),
                         .segment = links.memory.segment,
                         .memory = reinterpret_cast<const char*>(links.memory.outbox),
                         .segment_bytes = segment_bytes};
          },
          nb::kw_only(), nb::arg("communicator"), nb::arg("segment_window"), nb::arg("memory_window"),
          nb::arg("segment_bytes"))
      .def_prop_ro("address", [](const Links& links) { return reinterpret_cast<Address>(&links); });
  nb::class_<NetworkLayout>(m, "NetworkLayout")
      .def(
          "__init__",
          [](NetworkLayout* self, const Shape& shape, int64_t num_warps) {
            new (self) NetworkLayout(NetworkLayout::make(shape, num_warps));
          },
          nb::arg("shape"), nb::arg("num_warps"))
      .def_ro("staging", &NetworkLayout::staging)
      .def_ro("warp_bytes", &NetworkLayout::warp_bytes)
      .def_ro("mirrors", &NetworkLayout::mirrors)
      .def_ro("mirror_bytes", &NetworkLayout::mirror_bytes)
      .def_ro("bytes", &NetworkLayout::bytes);
  m.def(
      "closed_marks",
      [](const Shape& shape, int rank) {
        const Layout layout = Layout::make(shape);
        std::vector<int64_t> marks;
        for (int i = 0; i < shape.depth * kNumKinds * shape.num_ranks; ++i) {
          if (i % shape.num_ranks == rank) continue;
          marks.push_back(layout.mailboxes + i * int64_t{sizeof(Mailbox)} + int64_t{offsetof(Mailbox, closed)});
        }
        return marks;
      },
      "Offsets in a rank's segment of the marks that the other ranks set when they close, for both kinds of op.",
      nb::arg("shape"), nb::arg("rank"));
}

}  // namespace

void bind_launch(nb::module_& m) {
  bind_ops(m);
  bind_plan(m);
  bind_group(m);
  bind_sizes(m);
  bind_window_selector(m);
  m.def("launch", launch, nb::arg("launch_kernel"), nb::arg("launch_kernel_ex"), nb::arg("grids"), nb::arg("threads"),
        nb::arg("stream"), nb::arg("params"));
  m.def("device_state", [] {
    DeviceState state{};
    state.bad_entry = kNoBadEntry;
    return nb::bytes(reinterpret_cast<const char*>(&state), sizeof(state));
  });
  // Returns the failure that kernels have reported at this address, or None. The load pairs with the kernel's last
  // store.
  m.attr("HOST_RECORD_BYTES") = sizeof(HostRecord);
  m.def(
      "reported",
      [](Address record) -> std::optional<Status> {
        const HostRecord* r = at<HostRecord>(record);
        if (load_acquire(r->reported) == 0) return std::nullopt;
        return r->status;
      },
      nb::arg("record"));
  bind_links(m);
}
