// Part of moe_rt._engine that writes a segment header and reads segments; moe_rt/diagnostics builds reports from it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../cpu/recording.h"
#include "../cpu/report.h"

namespace nb = nanobind;
using namespace moe_rt;

namespace {

// Reads the segment in any object that holds bytes, for instance a read-only mapping.
SegmentReport read_buffer(nb::handle holder) {
  Py_buffer view;
  if (PyObject_GetBuffer(holder.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  struct Release {
    Py_buffer& view;
    ~Release() { PyBuffer_Release(&view); }
  } release{view};
  return read_segment(static_cast<const char*>(view.buf), view.len);
}

void bind_segment_header(nb::module_& m) {
  nb::class_<SegmentHeader>(m, "SegmentHeader")
      .def_ro("rank", &SegmentHeader::rank)
      .def_ro("num_ranks", &SegmentHeader::num_ranks)
      .def_ro("num_experts", &SegmentHeader::num_experts)
      .def_ro("num_max_tokens", &SegmentHeader::num_max_tokens)
      .def_ro("hidden", &SegmentHeader::hidden)
      .def_ro("num_topk", &SegmentHeader::num_topk)
      .def_ro("elem_bytes", &SegmentHeader::elem_bytes)
      .def_ro("config", &SegmentHeader::config)
      .def_ro("poison", &SegmentHeader::poison)
      .def_ro("mailboxes", &SegmentHeader::mailboxes)
      .def_ro("members", &SegmentHeader::members)
      .def_ro("op_records", &SegmentHeader::op_records)
      .def_ro("last_words", &SegmentHeader::last_words)
      .def_ro("num_nodes", &SegmentHeader::num_nodes);
}

void bind_op_record(nb::module_& m) {
  nb::class_<OpRecord>(m, "OpRecord")
      .def_ro("number", &OpRecord::number)
      .def_ro("seq", &OpRecord::seq)
      .def_prop_ro("op", [](const OpRecord& f) { return static_cast<int>(f.op); })
      .def_prop_ro("code", [](const OpRecord& f) { return static_cast<int>(f.code); })
      .def_ro("tag", &OpRecord::tag)
      .def_ro("num_tokens", &OpRecord::num_tokens)
      .def_ro("start_ns", &OpRecord::start_ns)
      .def_ro("announced_ns", &OpRecord::announced_ns)
      .def_ro("arrived_ns", &OpRecord::arrived_ns)
      .def_ro("end_ns", &OpRecord::end_ns)
      .def_ro("longest_ns", &OpRecord::longest_ns)
      .def_ro("longest_peer", &OpRecord::longest_peer)
      .def_ro("handle_seq", &OpRecord::handle_seq);
}

void bind_segment_report(nb::module_& m) {
  nb::class_<SegmentReport>(m, "SegmentReport")
      .def_ro("header", &SegmentReport::header)
      .def_prop_ro("poison", [](const SegmentReport& r) { return r.poison == 0 ? Status{} : poisoned(r.poison); })
      .def_prop_ro("announced", [](const SegmentReport& r) { return std::make_tuple(r.announced[0], r.announced[1]); })
      .def_ro("closed_to", &SegmentReport::closed_to)
      .def_prop_ro("members",
                   [](const SegmentReport& r) {
                     std::vector<std::tuple<int32_t, uint64_t>> members;
                     for (const Member& member : r.members) members.emplace_back(member.pid, member.inode);
                     return members;
                   })
      .def_prop_ro("nodes",
                   [](const SegmentReport& r) {
                     std::vector<int32_t> nodes;
                     for (const Member& member : r.members) nodes.push_back(member.node);
                     return nodes;
                   })
      .def_prop_ro("announcers",
                   [](const SegmentReport& r) { return std::make_tuple(r.announcers[0], r.announcers[1]); })
      .def_ro("clients", &SegmentReport::clients)
      .def_ro("op_records", &SegmentReport::op_records)
      .def_ro("num_torn", &SegmentReport::num_torn)
      .def_prop_ro("last_words",
                   [](const SegmentReport& r) { return nb::bytes(r.last_words.data(), r.last_words.size()); });
}

}  // namespace

void bind_report(nb::module_& m) {
  m.attr("NUM_OP_RECORDS") = kNumOpRecords;
  m.attr("MOST_LAST_WORDS") = sizeof(LastWords::text);
  bind_segment_header(m);
  bind_op_record(m);
  bind_segment_report(m);
  m.def("read_segment", &read_buffer, nb::arg("holder"));
  m.def(
      "write_segment_header",
      [](uint64_t segment, const Shape& shape, int rank, uint64_t config_hash,
         const std::vector<std::tuple<int32_t, uint64_t>>& members, const std::vector<int32_t>& nodes) {
        std::vector<Member> table;
        for (size_t r = 0; r < members.size(); ++r) {
          const auto [pid, inode] = members[r];
          table.push_back({pid, nodes.at(r), inode});
        }
        write_segment_header(reinterpret_cast<char*>(segment), shape, rank, config_hash, table);
      },
      nb::kw_only(), nb::arg("segment"), nb::arg("shape"), nb::arg("rank"), nb::arg("config_hash"), nb::arg("members"),
      nb::arg("nodes"));
}
