// Part of moe_rt._engine that makes the arguments by which a CUDA launch reaches unmapped peers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "../device/exchange.h"
#include "../device/sizes.h"
#include "arguments.h"

namespace nb = nanobind;
using namespace moe_rt;

namespace {

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

}  // namespace

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
        for (int i = 0; i < 2 * shape.num_ranks; ++i) {
          if (i % shape.num_ranks == rank) continue;
          marks.push_back(layout.mailboxes + i * int64_t{sizeof(Mailbox)} + int64_t{offsetof(Mailbox, closed)});
        }
        return marks;
      },
      "Offsets in a rank's segment of the marks that the other ranks set when they close, for both kinds of op.",
      nb::arg("shape"), nb::arg("rank"));
}
