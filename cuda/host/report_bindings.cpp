// The part of moe_rt._engine that writes a plaque and reads segments; moe_rt/diagnostics makes reports of it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "recording.h"
#include "report.h"

namespace nb = nanobind;
using namespace moe_rt;

namespace {

// Of anything that holds bytes, a mapping for one, be it read-only.
SegmentReport read_buffer(nb::handle holder) {
  Py_buffer view;
  if (PyObject_GetBuffer(holder.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  struct Release {
    Py_buffer& view;
    ~Release() { PyBuffer_Release(&view); }
  } release{view};
  return read_segment(static_cast<const char*>(view.buf), view.len);
}

}  // namespace

void bind_report(nb::module_& m) {
  m.attr("NUM_FLIGHTS") = kNumFlights;
  m.attr("MOST_LAST_WORDS") = sizeof(LastWords::text);
  nb::class_<Plaque>(m, "Plaque")
      .def_ro("rank", &Plaque::rank)
      .def_ro("num_ranks", &Plaque::num_ranks)
      .def_ro("num_experts", &Plaque::num_experts)
      .def_ro("num_max_tokens", &Plaque::num_max_tokens)
      .def_ro("hidden", &Plaque::hidden)
      .def_ro("num_topk", &Plaque::num_topk)
      .def_ro("elem_bytes", &Plaque::elem_bytes)
      .def_ro("config", &Plaque::config)
      .def_ro("poison", &Plaque::poison)
      .def_ro("mailboxes", &Plaque::mailboxes)
      .def_ro("members", &Plaque::members)
      .def_ro("flights", &Plaque::flights)
      .def_ro("last_words", &Plaque::last_words);
  nb::class_<Flight>(m, "Flight")
      .def_ro("number", &Flight::number)
      .def_ro("seq", &Flight::seq)
      .def_prop_ro("op", [](const Flight& f) { return static_cast<int>(f.op); })
      .def_prop_ro("code", [](const Flight& f) { return static_cast<int>(f.code); })
      .def_ro("tag", &Flight::tag)
      .def_ro("num_tokens", &Flight::num_tokens)
      .def_ro("start_ns", &Flight::start_ns)
      .def_ro("announced_ns", &Flight::announced_ns)
      .def_ro("heard_ns", &Flight::heard_ns)
      .def_ro("end_ns", &Flight::end_ns)
      .def_ro("longest_ns", &Flight::longest_ns)
      .def_ro("longest_peer", &Flight::longest_peer)
      .def_ro("handle_seq", &Flight::handle_seq);
  nb::class_<SegmentReport>(m, "SegmentReport")
      .def_ro("plaque", &SegmentReport::plaque)
      .def_prop_ro("poison",
                   [](const SegmentReport& r) {
                     return nb::make_tuple(static_cast<int>(poison_code(r.poison)), poison_origin(r.poison),
                                           poison_peer(r.poison));
                   })
      .def_prop_ro("announced", [](const SegmentReport& r) { return nb::make_tuple(r.announced[0], r.announced[1]); })
      .def_ro("said_goodbye", &SegmentReport::said_goodbye)
      .def_prop_ro("members",
                   [](const SegmentReport& r) {
                     std::vector<std::tuple<int64_t, uint64_t>> members;
                     for (const Member& member : r.members) members.emplace_back(member.pid, member.inode);
                     return members;
                   })
      .def_ro("flights", &SegmentReport::flights)
      .def_ro("num_torn", &SegmentReport::num_torn)
      .def_prop_ro("last_words",
                   [](const SegmentReport& r) { return nb::bytes(r.last_words.data(), r.last_words.size()); });

  m.def("read_segment", &read_buffer);
  m.def(
      "write_plaque",
      [](uint64_t segment, const Shape& shape, int rank, uint64_t config_hash,
         const std::vector<std::tuple<int64_t, uint64_t>>& members) {
        std::vector<Member> table;
        for (const auto& [pid, inode] : members) table.push_back({pid, inode});
        write_plaque(reinterpret_cast<char*>(segment), shape, rank, config_hash, table);
      },
      nb::kw_only(), nb::arg("segment"), nb::arg("shape"), nb::arg("rank"), nb::arg("config_hash"), nb::arg("members"));
}
