// moe_rt._engine: the CPU engine for Python. Tensors are passed as addresses, so that a call costs well under 1 us;
// moe_rt/engine gives them shapes. The GIL is released during the whole op, waits included, except when a long wait
// lets Python handle signals.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <system_error>

#include "../cpu/engine.h"
#include "../cpu/process.h"
#include "../net/network.h"
#include "arguments.h"
#include "tensor_reader.h"

namespace nb = nanobind;
using namespace moe_rt;

void bind_report(nb::module_& m);   // report_bindings.cpp
void bind_launch(nb::module_& m);   // launch_bindings.cpp
void bind_network(nb::module_& m);  // network_bindings.cpp
void bind_counts(nb::module_& m);   // counts_bindings.cpp

namespace {

// Runs the handlers of pending signals, which Python does only in its main thread. True if one has raised. Other
// threads return immediately: they would wait for the GIL without any effect.
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

// Like run, for an op that nearly always succeeds: success returns no object, because creating and checking one is
// slow.
template <class Fn>
std::optional<Status> failure_of(Fn&& op) {
  const Status status = run(op);
  return status.ok() ? std::nullopt : std::optional(status);
}

std::optional<tuning::StreamShares> shares_of(const std::optional<std::tuple<double, double, double, double>>& given) {
  if (!given) return std::nullopt;
  const auto [published, received, pushed, combined] = *given;
  return tuning::StreamShares{published, received, pushed, combined};
}

// Raises OSError if the system refuses the engine's threads.
void make_engine(Engine* self, EngineConfig config) {
  try {
    new (self) Engine(std::move(config));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    nb::raise_python_error();
  }
}

void bind_constants(nb::module_& m) {
  m.attr("MAX_TOPK") = kMaxTopk;
  m.attr("ROW_ALIGN") = kRowAlign;
  m.attr("NEAR_NS") = tuning::kNearNs;
  m.attr("VECTORS_AT_ONCE") = tuning::kVectorsAtOnce;
  m.attr("ENTRIES_PER_LANE") = tuning::kEntriesPerLane;
  m.attr("BLOCKS_PER_ROUTER") = tuning::kBlocksPerRouter;
  m.attr("TAG_BITS") = kTagBits;
  m.def("elements", [] {
    std::vector<std::tuple<std::string, std::string>> names;
    for (const rows::ElemNames& e : rows::kElemNames) names.emplace_back(e.torch, e.device);
    return names;
  });
}

void bind_shape(nb::module_& m) {
  nb::class_<Shape>(m, "Shape")
      .def(
          "__init__",
          [](Shape* self, int num_ranks, int num_experts, int num_max_tokens, int hidden, int num_topk, int elem_bytes,
             bool by_token, int alignment, int num_pushed_tokens, int num_pushed_rows, int sums, int depth,
             const std::vector<int32_t>& node_of) {
            const Shape shape{.num_ranks = num_ranks,
                              .num_experts = num_experts,
                              .num_max_tokens = num_max_tokens,
                              .hidden = hidden,
                              .num_topk = num_topk,
                              .elem_bytes = elem_bytes,
                              .acc_bytes = elem_bytes == 8 ? 8 : 4,
                              .recv_layout = by_token ? RecvLayout::kTokens : RecvLayout::kExperts,
                              .alignment = alignment,
                              .num_pushed_tokens = num_pushed_tokens,
                              .num_pushed_rows = num_pushed_rows,
                              .sums = static_cast<Sums>(sums),
                              .depth = depth};
            new (self) Shape(NodeTables::sized(shape, node_of));
          },
          nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("num_max_tokens"), nb::arg("hidden"),
          nb::arg("num_topk"), nb::arg("elem_bytes"), nb::arg("by_token"), nb::arg("alignment"),
          nb::arg("num_pushed_tokens"), nb::arg("num_pushed_rows"), nb::arg("sums"), nb::arg("depth"),
          nb::arg("node_of"))
      .def("row_bytes", &Shape::row_bytes)
      .def(
          "tokens_at",
          [](const Shape& s, int window) { return Layout::of_channel(s, window / 2).window[window % 2].tokens; },
          nb::arg("window"))
      .def(
          "staged_at",
          [](const Shape& s, int client_index) {
            const Layout::Staged staged = Layout::make(s).staged;
            return staged.lists + client_index * staged.bytes;
          },
          nb::arg("client_index"))
      .def("segment_bytes", [](const Shape& s) { return Layout::make(s).bytes; })
      .def(
          "recv_plan_ints", [](const Shape& s, int num_local) { return RecvPlan::num_ints(s, num_local); },
          nb::arg("num_local"))
      .def(
          "recv_ids_at", [](const Shape& s, int num_local) { return RecvPlan::ids_at(s, num_local); },
          nb::arg("num_local"));
}

// Enumerators are passed as integers; moe_rt/errors.py names them and a test compares the two.
void bind_status(nb::module_& m) {
  nb::class_<Status>(m, "Status")
      .def_prop_ro("code", [](const Status& s) { return static_cast<int>(s.code); })
      .def_prop_ro("op", [](const Status& s) { return static_cast<int>(s.op); })
      .def_prop_ro("phase", [](const Status& s) { return static_cast<int>(s.phase); })
      .def_ro("peer", &Status::peer)
      .def_ro("seq", &Status::seq)
      .def_ro("got", &Status::got)
      .def_ro("expected", &Status::expected);
}

void bind_fault(nb::module_& m) {
  nb::class_<Fault>(m, "Fault")
      .def(
          "__init__",
          [](Fault* self, int at, int action, uint64_t op, double seconds) {
            new (self) Fault{
                .at = static_cast<Point>(at), .action = static_cast<Action>(action), .op = op, .seconds = seconds};
          },
          nb::kw_only(), nb::arg("at"), nb::arg("action"), nb::arg("op"), nb::arg("seconds"))
      .def_prop_ro("at", [](const Fault& f) { return static_cast<int>(f.at); })
      .def("strike", &Fault::strike, nb::call_guard<nb::gil_scoped_release>());
}

void bind_tensor_reader(nb::module_& m) {
  nb::class_<TensorReader>(m, "TensorReader")
      .def(
          "__init__",
          [](TensorReader* self, nb::handle tensor, const Shape& shape, int elem, int64_t plan_ints, bool on_cuda,
             int device_index, int64_t vector_bytes) {
            const int device_type = on_cuda ? nb::device::cuda::value : nb::device::cpu::value;
            new (self) TensorReader(tensor, shape, static_cast<rows::Elem>(elem), plan_ints,
                                    {device_type, device_index}, vector_bytes);
          },
          nb::kw_only(), nb::arg("tensor"), nb::arg("shape"), nb::arg("elem"), nb::arg("plan_ints"), nb::arg("on_cuda"),
          nb::arg("device_index"), nb::arg("vector_bytes"))
      .def("avoid", &TensorReader::avoid, nb::kw_only(), nb::arg("begin"), nb::arg("end"))
      .def("dispatch", &TensorReader::dispatch, nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::sig("def dispatch(self, x: object, topk_idx: object, topk_weights: object, /) -> int"))
      .def("combine", &TensorReader::combine, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::sig("def combine(self, y: object, recv_weights: object | None, recv_plan: object, send_plan: object, /)"
                   " -> tuple[int, int, int] | None"))
      .def("combine_backward", &TensorReader::combine_backward, nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::arg().none(),
           nb::sig("def combine_backward(self, grad_out: object, y: object, recv_weights: object, recv_plan: object, /)"
                   " -> bool"));
}

void bind_engine_config(nb::class_<Engine>& engine) {
  engine.def(
      "__init__",
      [](Engine* self, const Shape& shape, int elem, int rank, uint64_t config_hash, std::vector<int32_t> expert_rank,
         std::vector<int32_t> node_of, std::vector<uint64_t> segments, std::vector<int> watches, double timeout_s,
         int dispatch_codec, int combine_codec, bool drop_overflow, int num_lanes, std::string isa, const Fault& fault,
         int64_t cache_bytes, double near_ns, std::optional<std::tuple<double, double, double, double>> stream_shares,
         int num_cores, std::shared_ptr<Network> network) {
        make_engine(self, EngineConfig{.shape = shape,
                                       .elem = static_cast<rows::Elem>(elem),
                                       .rank = rank,
                                       .config_hash = config_hash,
                                       .expert_rank = std::move(expert_rank),
                                       .node_of = std::move(node_of),
                                       .segments = std::move(segments),
                                       .watches = std::move(watches),
                                       .timeout_s = timeout_s,
                                       .dispatch_codec = static_cast<Codec>(dispatch_codec),
                                       .combine_codec = static_cast<Codec>(combine_codec),
                                       .drop_overflow = drop_overflow,
                                       .num_lanes = num_lanes,
                                       .isa = std::move(isa),
                                       .fault = fault,
                                       .cache_bytes = cache_bytes,
                                       .near_ns = near_ns,
                                       .stream_shares = shares_of(stream_shares),
                                       .num_cores = num_cores,
                                       .interrupted = interrupted,
                                       .network = std::move(network)});
      },
      nb::kw_only(), nb::arg("shape"), nb::arg("elem"), nb::arg("rank"), nb::arg("config_hash"), nb::arg("expert_rank"),
      nb::arg("node_of"), nb::arg("segments"), nb::arg("watches"), nb::arg("timeout_s"), nb::arg("dispatch_codec"),
      nb::arg("combine_codec"), nb::arg("drop_overflow"), nb::arg("num_lanes"), nb::arg("isa"), nb::arg("fault"),
      nb::arg("cache_bytes"), nb::arg("near_ns"), nb::arg("stream_shares").none(), nb::arg("num_cores"),
      nb::arg("network").none());
}

// Binds the two halves of an op by the type of its arguments.
template <class Args>
void bind_halves(nb::class_<Engine>& engine, Status (Engine::*op)(const Args&, uint32_t, Half), const char* begin,
                 const char* finish) {
  const auto half = [op](Half which) {
    return [=](Engine& e, const Args& args, uint32_t tag) {
      return failure_of([&] { return (e.*op)(args, tag, which); });
    };
  };
  engine.def("begin", half(Half::kFirst), nb::sig(begin)).def("finish", half(Half::kSecond), nb::sig(finish));
}

// Arguments are positional, which nanobind parses fastest; calls with many fields pass them in the args objects.
void bind_engine_ops(nb::class_<Engine>& engine) {
  engine
      .def(
          "dispatch",
          [](Engine& e, const DispatchArgs& args, uint32_t tag) {
            return failure_of([&] { return e.dispatch(args, tag); });
          },
          nb::sig("def dispatch(self, args: DispatchArgs, tag: int, /) -> Status | None"))
      .def(
          "combine",
          [](Engine& e, const CombineArgs& args, uint32_t tag) {
            return failure_of([&] { return e.combine(args, tag); });
          },
          nb::sig("def combine(self, args: CombineArgs, tag: int, /) -> Status | None"))
      .def(
          "combine_backward",
          [](Engine& e, const CombineBackwardArgs& args, uint32_t tag) {
            return failure_of([&] { return e.combine_backward(args, tag); });
          },
          nb::sig("def combine_backward(self, args: CombineBackwardArgs, tag: int, /) -> Status | None"))
      .def(
          "refuse",
          [](Engine& e, int op, int code, int64_t got, int64_t expected, uint32_t tag) {
            return run([&] { return e.refuse(static_cast<Op>(op), static_cast<Code>(code), got, expected, tag); });
          },
          nb::kw_only(), nb::arg("op"), nb::arg("code"), nb::arg("got"), nb::arg("expected"), nb::arg("tag"));
  bind_halves(engine, &Engine::dispatch, "def begin(self, args: DispatchArgs, tag: int, /) -> Status | None",
              "def finish(self, args: DispatchArgs, tag: int, /) -> Status | None");
  bind_halves(engine, &Engine::combine, "def begin(self, args: CombineArgs, tag: int, /) -> Status | None",
              "def finish(self, args: CombineArgs, tag: int, /) -> Status | None");
  bind_halves(engine, &Engine::combine_backward,
              "def begin(self, args: CombineBackwardArgs, tag: int, /) -> Status | None",
              "def finish(self, args: CombineBackwardArgs, tag: int, /) -> Status | None");
}

// The engine's failures, records and measurements.
void bind_engine_state(nb::class_<Engine>& engine) {
  engine
      .def(
          "leave_words", [](Engine& e, const nb::bytes& text) { e.leave_words({text.c_str(), text.size()}); },
          nb::arg("text"))
      .def(
          "remote_last_words",
          [](Engine& e, int peer) {
            std::string words;
            {
              const nb::gil_scoped_release release;
              words = e.remote_last_words(peer);
            }
            return nb::bytes(words.data(), words.size());
          },
          nb::arg("peer"))
      .def(
          "poison", [](Engine& e, int code, int peer) { e.poison(static_cast<Code>(code), peer); }, nb::kw_only(),
          nb::arg("code"), nb::arg("peer"))
      .def("needed_rows", &Engine::needed_rows)
      .def("next_token_window", &Engine::next_token_window)
      .def("health", &Engine::health)
      .def("op_record", [](const Engine& e) { return OpRecord(e.op_record()); })
      .def("arrival_ns", &Engine::arrival_ns)
      .def("line_latency_ns", &Engine::line_latency_ns)
      .def("waited_ns", &Engine::waited_ns)
      .def("stream_from", [](const Engine& e) { return Engine::StreamFrom(e.stream_from()); })
      .def("close", &Engine::close);
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine::StreamFrom>(m, "StreamFrom")
      .def_ro("published", &Engine::StreamFrom::published)
      .def_ro("received", &Engine::StreamFrom::received)
      .def_ro("pushed", &Engine::StreamFrom::pushed)
      .def_ro("combined", &Engine::StreamFrom::combined);
  nb::class_<Engine> engine(m, "Engine");
  bind_engine_config(engine);
  bind_engine_ops(engine);
  bind_engine_state(engine);
}

void bind_process(nb::module_& m) {
  m.def("has_ended", &has_ended, nb::arg("descriptor"));
  m.def(
      "process_state",
      [](int descriptor) {
        const char state = read_stat(descriptor).state;
        return state ? std::string(1, state) : std::string();
      },
      nb::arg("descriptor"));
}

// One row op by itself, for tests and benchmarks of the instruction sets: float accumulators, any element type.
void bind_rows(nb::module_& m) {
  m.def(
      "weighted_sum",
      [](const std::string& isa, int elem, Address dst, const std::vector<Address>& srcs,
         const std::vector<double>& weights, int64_t hidden, bool stream) {
        const rows::Table* table = rows::find_table(isa.c_str());
        if (!table) throw nb::value_error("this machine or build has no row primitives for that isa");
        if (srcs.size() > kMaxTopk) throw nb::value_error("more rows than a token has experts");
        std::vector<const char*> pointers;
        for (const Address src : srcs) pointers.push_back(at<char>(src));
        const int n = static_cast<int>(srcs.size());
        const auto which = static_cast<rows::Elem>(elem);
        if (const auto in_doubles = table->functions<double>(which).weighted_sum) {
          return in_doubles(at<char>(dst), pointers.data(), weights.data(), n, hidden, stream);
        }
        const std::vector<float> factors(weights.begin(), weights.end());
        table->functions<float>(which).weighted_sum(at<char>(dst), pointers.data(), factors.data(), n, hidden, stream);
      },
      nb::arg("isa"), nb::arg("elem"), nb::arg("dst"), nb::arg("srcs"), nb::arg("weights"), nb::arg("hidden"),
      nb::arg("stream"));
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const char* isa : {"portable", "avx2", "avx512"}) {
      if (rows::find_table(isa)) names.push_back(isa);
    }
    return names;
  });
}

}  // namespace

// Stubs list everything in this order.
NB_MODULE(_engine, m) {
  // FSDP keeps modules, and so their engines, past the interpreter's end; leaving a group does not depend on
  // destructors.
  nb::set_leak_warnings(false);
  bind_constants(m);
  bind_shape(m);
  bind_status(m);
  bind_report(m);
  bind_launch(m);
  bind_network(m);
  bind_fault(m);
  bind_tensor_reader(m);
  bind_engine(m);
  bind_process(m);
  bind_rows(m);
  bind_counts(m);
}
