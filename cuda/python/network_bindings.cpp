// Networks for Python, which creates them and passes them to the engine; heap/ucx.py also connects its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../net/mapped_network.h"
#include "../net/ucx_network.h"

namespace nb = nanobind;
using namespace moe_rt;

void bind_network(nb::module_& m) {
  nb::class_<Network>(m, "Network");
  nb::class_<MappedNetwork, Network>(m, "MappedNetwork")
      .def(nb::init<const std::vector<uint64_t>&, const Shape&, int>(), nb::kw_only(), nb::arg("segments"),
           nb::arg("shape"), nb::arg("rank"));
  nb::class_<UcxNetwork, Network>(m, "UcxNetwork")
      .def(
          "__init__",
          [](UcxNetwork* self, const std::string& library, int descriptor, const Shape& shape, int rank) {
            const nb::gil_scoped_release release;
            new (self) UcxNetwork(library.c_str(), descriptor, shape, rank);
          },
          nb::kw_only(), nb::arg("library"), nb::arg("descriptor"), nb::arg("shape"), nb::arg("rank"))
      .def("address", [](const UcxNetwork& n) { return nb::bytes(n.address().data(), n.address().size()); })
      .def("secret", &UcxNetwork::secret)
      .def(
          "connect",
          [](UcxNetwork& n, int peer, const nb::bytes& address, uint64_t secret) {
            n.connect(peer, {static_cast<const char*>(address.data()), address.size()}, secret);
          },
          nb::kw_only(), nb::arg("peer"), nb::arg("address"), nb::arg("secret"))
      .def("flushed", &UcxNetwork::flushed, nb::arg("peer"))
      .def("lost", &UcxNetwork::lost, nb::arg("peer"))
      .def("problem", &UcxNetwork::problem, nb::arg("peer"));
  m.def("ucx_version", &UcxNetwork::version, nb::arg("library"));
  m.def("await_networks", &UcxNetwork::await_all, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
}
