// moe_rt._engine: the CPU engine for Python. Tensors come as addresses, so that a call costs well under a microsecond;
// moe_rt/native/cpu.py gives them shapes. The GIL is released for the whole of every op, waits included, but for the
// moments in which a long wait lets Python handle signals.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <system_error>

#include "../device/exchange.h"
#include "../device/sizes.h"
#include "engine.h"
#include "plan_mark.h"
#include "process.h"

namespace nb = nanobind;
using namespace moe_rt;

void bind_report(nb::module_& m);  // report_bindings.cpp

namespace {

using Address = uint64_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Runs the handlers of signals that have come, as Python does it in its main thread alone. True when one has raised.
// Other threads do not ask: for the GIL they might wait long, and in vain.
bool interrupted() {
  if (syscall(SYS_gettid) != getpid()) return false;
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Runs an op without the GIL, and raises what a signal handler raised meanwhile.
template <class Fn>
Status run(Fn&& op) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = op();
  }
  if (PyErr_Occurred()) nb::raise_python_error();
  return status;
}

// The engine starts threads, which the system may refuse: an OSError then.
void make_engine(Engine* self, EngineConfig config) {
  try {
    new (self) Engine(std::move(config));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    nb::raise_python_error();
  }
}

Status dispatch(Engine& engine, Address x, Address topk_idx, Address topk_weights, int64_t num_tokens, Address recv_x,
                Address recv_weights, Address offs, Address recv_plan, Address send_plan, uint32_t tag) {
  const DispatchArgs args{at<void>(x),       at<int64_t>(topk_idx),  at<void>(topk_weights),
                          num_tokens,        at<void>(recv_x),       at<void>(recv_weights),
                          at<int32_t>(offs), at<int32_t>(recv_plan), at<int32_t>(send_plan)};
  return run([&] { return engine.dispatch(args, tag); });
}

Status combine(Engine& engine, int op, Address y, Address recv_weights, Address grad_recv_weights, Address recv_plan,
               Address send_plan, int64_t num_tokens, Address out, Address grad_topk_weights, uint32_t tag) {
  const CombineArgs args{
      static_cast<Op>(op),    at<void>(y), at<void>(recv_weights), at<void>(grad_recv_weights), at<int32_t>(recv_plan),
      at<int32_t>(send_plan), num_tokens,  at<void>(out),          at<void>(grad_topk_weights)};
  return run([&] { return engine.combine(args, tag); });
}

Status combine_backward(Engine& engine, Address grad_out, int64_t num_tokens, Address y, Address recv_weights,
                        Address recv_plan, Address grad_y, Address grad_recv_weights, uint32_t tag) {
  const CombineBackwardArgs args{at<void>(grad_out),
                                 num_tokens,
                                 at<void>(y),
                                 at<void>(recv_weights),
                                 at<int32_t>(recv_plan),
                                 at<void>(grad_y),
                                 at<void>(grad_recv_weights)};
  return run([&] { return engine.combine_backward(args, tag); });
}

Shape make_shape(int num_ranks, int num_experts, int num_max_tokens, int hidden, int num_topk, int elem_bytes) {
  return {num_ranks, num_experts, num_max_tokens, hidden, num_topk, elem_bytes, elem_bytes == 8 ? 8 : 4};
}

}  // namespace

NB_MODULE(_engine, m) {
  // FSDP keeps modules, and so their engines, past the interpreter's end; leaving a group does not depend on that.
  nb::set_leak_warnings(false);

  m.attr("MAX_TOPK") = kMaxTopk;
  m.attr("NEAR_NS") = kNearNs;
  m.attr("TAG_BITS") = kTagBits;
  // Where in the int32 tensor recv_plan Python may look.
  m.attr("PLAN_CAPACITY") = offsetof(RecvPlan::Head, capacity) / sizeof(int32_t);
  m.attr("PLAN_NUM_DROPPED") = offsetof(RecvPlan::Head, num_dropped) / sizeof(int32_t);

  nb::class_<Shape>(m, "Shape")
      .def(
          "__init__",
          [](Shape* self, int num_ranks, int num_experts, int num_max_tokens, int hidden, int num_topk,
             int elem_bytes) {
            new (self) Shape(make_shape(num_ranks, num_experts, num_max_tokens, hidden, num_topk, elem_bytes));
          },
          nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("num_max_tokens"), nb::arg("hidden"),
          nb::arg("num_topk"), nb::arg("elem_bytes"))
      .def("segment_bytes", [](const Shape& s) { return Layout::make(s).bytes; })
      .def("recv_plan_ints", [](const Shape& s, int num_local) { return RecvPlan::num_ints(s, num_local); });

  // Enumerators travel as integers; moe_rt/errors.py names them and a test compares the two.
  nb::class_<Status>(m, "Status")
      .def_prop_ro("code", [](const Status& s) { return static_cast<int>(s.code); })
      .def_prop_ro("op", [](const Status& s) { return static_cast<int>(s.op); })
      .def_prop_ro("phase", [](const Status& s) { return static_cast<int>(s.phase); })
      .def_ro("peer", &Status::peer)
      .def_ro("seq", &Status::seq)
      .def_ro("got", &Status::got)
      .def_ro("expected", &Status::expected);

  nb::class_<Fault>(m, "Fault")
      .def(
          "__init__",
          [](Fault* self, int at, int action, uint64_t op, double seconds) {
            new (self) Fault{static_cast<Point>(at), static_cast<Action>(action), op, seconds};
          },
          nb::kw_only(), nb::arg("at"), nb::arg("action"), nb::arg("op"), nb::arg("seconds"))
      .def_prop_ro("at", [](const Fault& f) { return static_cast<int>(f.at); })
      .def("strike", &Fault::strike, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, const Shape& shape, int elem, int rank, uint64_t config_hash,
             std::vector<int32_t> expert_rank, std::vector<int64_t> capacity, std::vector<uint64_t> segments,
             std::vector<int> watches, double timeout_s, int dispatch_codec, int combine_codec, bool drop_overflow,
             int num_lanes, std::string isa, const Fault& fault, int64_t cache_bytes, double near_ns, int num_cores) {
            make_engine(self, EngineConfig{shape,
                                           static_cast<rows::Elem>(elem),
                                           rank,
                                           config_hash,
                                           std::move(expert_rank),
                                           std::move(capacity),
                                           std::move(segments),
                                           std::move(watches),
                                           timeout_s,
                                           static_cast<Codec>(dispatch_codec),
                                           static_cast<Codec>(combine_codec),
                                           drop_overflow,
                                           num_lanes,
                                           std::move(isa),
                                           /*first_seq=*/1,
                                           fault,
                                           cache_bytes,
                                           near_ns,
                                           num_cores,
                                           interrupted});
          },
          nb::kw_only(), nb::arg("shape"), nb::arg("elem"), nb::arg("rank"), nb::arg("config_hash"),
          nb::arg("expert_rank"), nb::arg("capacity"), nb::arg("segments"), nb::arg("watches"), nb::arg("timeout_s"),
          nb::arg("dispatch_codec"), nb::arg("combine_codec"), nb::arg("drop_overflow"), nb::arg("num_lanes"),
          nb::arg("isa"), nb::arg("fault"), nb::arg("cache_bytes"), nb::arg("near_ns"), nb::arg("num_cores"))
      .def("dispatch", &dispatch)
      .def("combine", &combine)
      .def("combine_backward", &combine_backward)
      .def("refuse",
           [](Engine& e, int op, int code, int64_t got, int64_t expected, uint32_t tag) {
             return run([&] { return e.refuse(static_cast<Op>(op), static_cast<Code>(code), got, expected, tag); });
           })
      .def("leave_words", [](Engine& e, const nb::bytes& text) { e.leave_words({text.c_str(), text.size()}); })
      .def("poison", [](Engine& e, int code, int peer) { e.poison(static_cast<Code>(code), peer); })
      .def("needed_rows", &Engine::needed_rows)
      .def("set_capacity", &Engine::set_capacity)
      .def("health", &Engine::health)
      .def("timings",
           [](const Engine& e) {
             const OpRecord& f = e.op_record();
             return nb::make_tuple(static_cast<int>(f.op), f.announced_ns - f.start_ns, f.heard_ns - f.announced_ns,
                                   f.end_ns - f.heard_ns, e.arrival_ns(), e.line_latency_ns());
           })
      .def("waited_ns", &Engine::waited_ns)
      .def("stream_from",
           [](const Engine& e) {
             const Engine::StreamFrom& from = e.stream_from();
             return nb::make_tuple(from.published, from.received, from.pushed, from.combined);
           })
      .def("close", &Engine::close);
  bind_report(m);
  m.def("has_ended", &has_ended);

  // What a CUDA launch is given, in the bytes that the kernels read: moe_rt/native/cuda.py knows no C++ struct.
  m.def("placement_tables", [](const std::vector<int32_t>& expert_rank, int num_ranks) {
    PlacementTables t = PlacementTables::make(expert_rank, num_ranks);
    return std::make_tuple(std::move(t.position), std::move(t.owner), std::move(t.rank_first));
  });
  m.def(
      "world",
      [](const Shape& shape, int rank, uint64_t config_hash, Address position, Address owner, Address rank_first,
         Address capacity, Address base, Address mirror) {
        const World w{shape,
                      Layout::make(shape),
                      {at<int32_t>(position), at<int32_t>(owner), at<int32_t>(rank_first)},
                      at<int64_t>(capacity),
                      at<char*>(base),
                      at<char*>(mirror),
                      rank,
                      config_hash,
                      new_plan_mark()};
        return nb::bytes(reinterpret_cast<const char*>(&w), sizeof(w));
      },
      nb::kw_only(), nb::arg("shape"), nb::arg("rank"), nb::arg("config_hash"), nb::arg("position"), nb::arg("owner"),
      nb::arg("rank_first"), nb::arg("capacity"), nb::arg("base"), nb::arg("mirror"));
  m.def("scratch_bytes", [](const Shape& shape, const std::vector<int32_t>& expert_rank, int rank, int threads) {
    const PlacementTables t = PlacementTables::make(expert_rank, shape.num_ranks);
    World w{};
    w.shape = shape, w.rank = rank, w.placement = t.view();
    return scratch_bytes(w, threads);
  });
  m.attr("MAX_SCRATCH_BYTES") = kScratchBytes;
  m.def("network_layout", [](const Shape& shape, int64_t num_warps) {
    const NetworkLayout n = NetworkLayout::make(shape, num_warps);
    return std::make_tuple(n.staging, n.mirrors, n.mirror_bytes, n.bytes, shape.row_bytes());
  });
  m.def("device_state", [] {
    DeviceState state{};
    state.bad_entry = kNoBadEntry;
    return nb::bytes(reinterpret_cast<const char*>(&state), sizeof(state));
  });
  // The failure that kernels have reported at this address, or None. The load pairs with the kernel's last store.
  m.attr("HOST_RECORD_BYTES") = sizeof(HostRecord);
  m.def("reported", [](Address record) -> nb::object {
    const HostRecord* r = at<HostRecord>(record);
    return load_acquire(r->reported) == 0 ? nb::none() : nb::cast(r->status);
  });

  // One row op on its own, for tests and benchmarks of the instruction sets: float accumulators, any element type.
  m.def("weighted_sum", [](const std::string& isa, int elem, Address dst, const std::vector<Address>& srcs,
                           const std::vector<double>& weights, int64_t hidden, bool stream) {
    const rows::Table* table = rows::find_table(isa.c_str());
    if (!table) throw nb::value_error("this machine or build has no row primitives for that isa");
    if (srcs.size() > kMaxTopk) throw nb::value_error("more rows than a token has experts");
    std::vector<const char*> pointers;
    for (const Address src : srcs) pointers.push_back(at<char>(src));
    const int n = static_cast<int>(srcs.size());
    if (static_cast<rows::Elem>(elem) == rows::Elem::kFloat64) {
      return table->f64.weighted_sum(at<char>(dst), pointers.data(), weights.data(), n, hidden, stream);
    }
    const std::vector<float> factors(weights.begin(), weights.end());
    const rows::Functions<float>* functions[] = {&table->f32, &table->bf16, &table->f16};
    functions[elem]->weighted_sum(at<char>(dst), pointers.data(), factors.data(), n, hidden, stream);
  });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const char* isa : {"portable", "avx2", "avx512"}) {
      if (rows::find_table(isa)) names.push_back(isa);
    }
    return names;
  });
}
