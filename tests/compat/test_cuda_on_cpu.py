"""Values and effects of torch.cuda on CPU ranks, by programs that look at all of them."""

from __future__ import annotations

from support.forked_python import run_python

BEGIN = """
import os, resource, time
import torch
from moe_rt.lab.on_cpu import hooks
os.environ[hooks.DEVICES] = "3"
hooks.activate()
cuda = torch.cuda
def refused(said, fn):
    try:
        fn()
    except hooks.NotOnCpu as error:
        assert str(error) == said, error
    else:
        raise AssertionError(said)
"""


def passes(program: str) -> None:
    done = run_python("-c", BEGIN + program + '\nprint("passed")\n')
    assert done.stdout == "passed\n", done.stderr[-3000:]


def test_properties_of_a_device() -> None:
    """Programs choose kernels and sizes by them, as on a GPU of compute capability 9.0."""
    passes("""
found = vars(cuda.get_device_properties(2))
assert found.pop("total_memory") == cuda.mem_get_info()[1]
assert found == dict(
    name="CPU rank of moe-rt on-cpu", major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, is_integrated=0, is_multi_gpu_board=0,
    gcnArchName="", uuid="", pci_bus_id=2, pci_device_id=0, pci_domain_id=0, clock_rate=10**6,
    memory_clock_rate=10**6, memory_bus_width=64), found
assert cuda.get_device_name() == cuda.get_device_name(1) == cuda.memory_summary() == "CPU rank of moe-rt on-cpu"
assert cuda.get_device_capability() == (9, 0) and cuda.get_arch_list() == ["sm_90"]
assert cuda.nccl.version() == (2, 27, 3)
none = "expected one of 3 (moe-rt on-cpu --ranks)"
refused(f"torch.cuda.get_device_properties: got device 3, {none}", lambda: cuda.get_device_properties(3))
refused(f"torch.cuda.set_device: got device 4, {none}", lambda: cuda.set_device("cuda:4"))
refused(f"device: got cuda:3, {none}", lambda: torch.ones(1, device="cuda:3"))
""")


def test_answers_to_simple_questions() -> None:
    passes("""
for name, answer in dict(is_available=True, is_initialized=True, _is_in_bad_fork=False, is_bf16_supported=True,
                         get_sync_debug_mode=0, memory_usage=0, utilization=0, is_current_stream_capturing=False,
                         memory_snapshot=[], current_device=0, device_count=3).items():
    found = getattr(cuda, name)()
    assert found == answer and type(found) is type(answer), name
assert cuda.can_device_access_peer(0, 1) is True
nothing = ("init", "synchronize", "ipc_collect", "empty_cache", "reset_peak_memory_stats",
           "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
           "set_per_process_memory_fraction", "_sleep", "set_sync_debug_mode")
for name in nothing:
    assert getattr(cuda, name)(1) is None, name
for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
    assert getattr(cuda.nvtx, name)("a range") is None, name
assert cuda.cudart().cudaProfilerStart() is None and cuda.cudart().cudaProfilerStop() is None
cuda.set_device(1)
with cuda.device_of(torch.ones(1)):
    assert cuda.current_device() == 1
assert isinstance(cuda.default_generators, tuple) and set(cuda.default_generators) == {torch.default_generator}
for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
    assert getattr(cuda, f"{kind}Tensor") is getattr(torch, f"{kind}Tensor"), kind
""")


def test_what_is_refused_by_name() -> None:
    """It can be named and subclassed. A function that would start CUDA is named as well."""
    passes("""
why = "got a use of it on CPU ranks, which have none; expected a path without it"
for name in ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "MemPool", "CUDAPluggableAllocator"):
    made = getattr(cuda, name)
    assert made.__name__ == name and made.__doc__ == "Raises NotOnCpu."
    class Own(made): ...
    refused(f"torch.cuda.{name}: {why}", lambda: Own(1, key=2))
    refused(f"torch.cuda.{name}: {why}", made)
assert cuda.graphs.CUDAGraph is cuda.CUDAGraph
for name in ("_record_memory_history", "_dump_snapshot", "_snapshot"):
    refused(f"torch.cuda.memory.{name}: {why}", getattr(cuda.memory, name))
refused(f"torch.cuda.cudart().cudaMemcpy: {why}", lambda: cuda.cudart().cudaMemcpy)
refused(f"torch.cuda.current_blas_handle: {why}", cuda.current_blas_handle)
refused("torch.cuda.Event: got interprocess=True, expected events of one process",
        lambda: cuda.Event(interprocess=True))
""")


def test_streams_and_events_in_every_detail() -> None:
    passes("""
stream = cuda.Stream()
assert (stream.device_index, stream.priority, stream.stream_id, stream.device_type) == (0, 0, 0, 1)
assert (stream.device, stream.cuda_stream) == (torch.device("cpu"), 0)
assert (stream.query(), stream.is_capturing()) == (True, False)
cuda.set_device(2)
other = cuda.Stream(device="cuda:1", priority=-1, stream_id="7")
assert (other.device_index, other.priority, other.stream_id, cuda.Stream().device_index) == (1, -1, 7, 2)
assert cuda.ExternalStream is cuda.Stream and cuda.StreamContext is cuda.stream
assert stream.wait_stream(other) is stream.wait_event(cuda.Event()) is stream.synchronize() is None
import moe_rt.lab.on_cpu.cuda as module
now = iter([2.0, 2.25, 1.0])
class Clock: perf_counter = staticmethod(lambda: next(now))
module.time = Clock
begin, end = cuda.Event(enable_timing=True), stream.record_event(fresh := cuda.Event())
assert end is fresh and fresh._at == 2.0
assert begin._at == 0.0 and begin.elapsed_time(end) == 2000.0
begin.record(stream)
assert begin.elapsed_time(end) == -250.0 and end.elapsed_time(begin) == 250.0
assert stream.record_event()._at == 1.0
assert begin.query() is True and begin.wait() is None and begin.synchronize() is None
cuda.set_stream(other)
assert cuda.current_stream() is other and cuda.current_stream(1) is other
cuda.set_stream(None)
assert cuda.current_stream() is other
with cuda.stream(stream):
    with other as inside:
        assert inside is other is cuda.current_stream()
    assert cuda.current_stream() is stream
assert cuda.current_stream() is other
import threading
seen = []
thread = threading.Thread(target=lambda: seen.append(cuda.current_stream()))
thread.start(); thread.join()
assert seen == [cuda.default_stream()], "each thread has its own"
for made, kind in ((torch.Stream("cuda", priority=-1), cuda.Stream), (torch.Stream(), cuda.Stream),
                   (torch.Event(device="cuda:0", enable_timing=True), cuda.Event), (torch.Event(), cuda.Event),
                   (torch.Stream(device=torch.device("cuda", 1)), cuda.Stream),
                   (torch.Stream(torch.ones(1, device="cuda").device), cuda.Stream), (torch.Event("cpu"), cuda.Event)):
    assert type(made) is kind
assert torch.Stream("meta").device.type == "meta", "torch's own"
refused("device: got cuda:3, expected one of 3 (moe-rt on-cpu --ranks)", lambda: torch.Stream("cuda:3"))
assert torch.Stream("cuda", priority=-1).priority == -1
assert torch.Stream.__name__ == "Stream" and "stream" in torch.Stream.__doc__.lower()
assert isinstance(cuda.Stream(), torch.Stream) and isinstance(cuda.Event(), torch.Event), "as on a GPU"
assert issubclass(cuda.Stream, torch.Stream) and not issubclass(int, torch.Stream)
assert not isinstance(cuda.Stream(), torch.Event)
""")


def test_devices_of_a_block() -> None:
    passes("""
for given, index in ((2, 2), ("cuda:1", 1), (torch.ones(1).device, 1), (None, 1)):
    cuda.set_device(1)
    with cuda.device(given) as entered:
        assert entered is None and cuda.current_device() == index, given
    assert cuda.current_device() == 1
chosen = cuda.device(2)
with chosen:
    assert (chosen.idx, chosen.prev_idx) == (2, 1)
@cuda.device(2)
def decorated(): return cuda.current_device()
assert (decorated(), cuda.current_device()) == (2, 1)
try:
    with cuda.device(0):
        raise KeyError
except KeyError:
    assert cuda.current_device() == 1
cuda.set_device(-1)
assert cuda.current_device() == 0
""")


def test_memory_is_that_of_the_process_and_host() -> None:
    passes("""
import moe_rt.lab.on_cpu.cuda as module
real = os.sysconf
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
assert abs(cuda.memory_allocated() - resident()) < resident() / 10
assert cuda.memory_reserved.__code__ is cuda.memory_allocated.__code__ is cuda.memory_cached.__code__
class Usage: ru_maxrss = 10**9
class Resource:
    RUSAGE_SELF = resource.RUSAGE_SELF
    getrusage = staticmethod(lambda who: {resource.RUSAGE_SELF: Usage}[who])
module.resource = Resource
assert cuda.max_memory_allocated() == cuda.max_memory_reserved() == cuda.max_memory_cached() == 1024 * 10**9
Usage.ru_maxrss = 1
assert abs(cuda.max_memory_allocated(0) - resident()) < resident() / 10
Usage.ru_maxrss = 10**9
stats = cuda.memory_stats()
kinds = ("allocated_bytes", "active_bytes", "reserved_bytes")
assert list(stats) == [*(f"{kind}.all.{when}" for kind in kinds for when in ("current", "peak")),
                       "num_alloc_retries", "num_ooms"]
assert {stats[f"{kind}.all.peak"] for kind in kinds} == {1024 * 10**9}
assert all(abs(stats[f"{kind}.all.current"] - resident()) < resident() / 10 for kind in kinds)
assert (stats["num_alloc_retries"], stats["num_ooms"]) == (0, 0)
os.sysconf = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 3, "SC_PHYS_PAGES": 7}.__getitem__
assert cuda.mem_get_info() == cuda.mem_get_info(1) == (3 * 4096, 7 * 4096)
assert cuda.get_device_properties().total_memory == 7 * 4096
os.sysconf = real
for name in ("mem_get_info", "memory_allocated", "max_memory_allocated", "memory_stats", "empty_cache",
             "memory_summary", "memory_snapshot", "reset_peak_memory_stats"):
    assert getattr(cuda.memory, name) is getattr(cuda, name), name
""")


def test_random_numbers_are_those_of_the_cpu() -> None:
    passes("""
torch.manual_seed(9)
first = torch.rand(3)
for seed in (lambda: cuda.manual_seed(9), lambda: cuda.manual_seed_all("9"), cuda.seed, cuda.seed_all):
    torch.rand(5)
    seed()
    assert torch.equal(torch.rand(3), first)
assert cuda.initial_seed() == torch.initial_seed() == 9
states = cuda.get_rng_state_all()
assert len(states) == 1 and torch.equal(states[0], torch.get_rng_state())
later = torch.rand(3)
cuda.set_rng_state_all(states)
assert torch.equal(torch.rand(3), later)
state = cuda.get_rng_state(1)
later = torch.rand(3)
cuda.set_rng_state(state, 2)
assert torch.equal(torch.rand(3), later)
assert cuda.set_rng_state_all([]) is None
""")


def test_parts_of_torch_that_take_a_device() -> None:
    passes("""
import io
from torch.utils import _triton
with torch.autocast("cuda", torch.bfloat16):
    assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled(device_type="cuda")
    assert torch.get_autocast_dtype("cuda") == torch.bfloat16
torch.set_autocast_dtype("cuda", torch.float16)
assert torch.get_autocast_dtype("cpu") == torch.float16
torch.set_autocast_enabled("cuda", True)
assert torch.is_autocast_enabled("cpu")
torch.set_autocast_enabled("cuda", False)
with torch.autocast("cpu"):
    assert torch.get_autocast_dtype("cpu") == torch.float16, "as it was set"
with torch.autocast(device_type="cuda", dtype=None, enabled=False):
    assert not torch.is_autocast_enabled("cuda")
for scaler in (torch.amp.GradScaler("cuda", 4.0), torch.amp.GradScaler(device="cuda", init_scale=4.0)):
    assert scaler._device == "cpu" and scaler.scale(torch.ones(1)).item() == 4.0
file = io.BytesIO()
torch.save({"x": torch.ones(2)}, file)
for where in ("cuda:1", torch.device("cuda"), None, lambda storage, place: storage):
    file.seek(0)
    assert torch.load(file, map_location=where)["x"].device.type == "cpu"
x = torch.ones(2, 3)
assert x.record_stream(cuda.Stream()) is None and x.is_pinned() is True and x.is_cuda is True
assert x.to("meta").is_cuda is False and x.to("meta").device.type == "meta"
for made in (x.new_empty((2,), device="cuda"), x.new_full((2,), 3.0, device="cuda:1"), x.new_ones(2, device=0),
             x.new_tensor([1.0, 2.0], device="cuda"), x.new_zeros(2, device=torch.device("cuda")),
             x.new_empty_strided((2,), (1,), device="cuda"), torch.empty_like(x[0], device="cuda"),
             torch.randn_like(x[0], device="cuda", pin_memory=True), torch.arange(2, device="cuda"),
             torch.tensor([1], device=1), torch.full((2,), 1, device="cuda:2"), torch.eye(2, device="cuda"),
             torch.randint(0, 2, (2,), device="cuda"), torch.linspace(0, 1, 2, device="cuda")):
    assert made.device.type == "cpu"
assert x.to("cpu").data_ptr() != x.data_ptr() and x.to(1, non_blocking=True).data_ptr() != x.data_ptr()
y = x.to(torch.ones(1, dtype=torch.float64), True)
assert y.dtype == torch.float64
assert x.to("cuda", torch.float64, copy=True).dtype == x.to(device="cuda", dtype=torch.float64).dtype == torch.float64
middle = torch.ones(2, requires_grad=True) * 2
assert middle.cuda() is not middle and middle.cuda().requires_grad and x.cuda() is not x
assert x.cuda(non_blocking=True).device.type == x.cpu(torch.preserve_format).device.type == "cpu"
assert _triton.has_triton() is False
if hasattr(_triton, "has_triton_package"):
    assert _triton.has_triton_package() is False
_triton.has_triton.cache_clear()
kinds = torch.profiler.ProfilerActivity
for activities, expected in (({kinds.CUDA}, {kinds.CPU}), ([kinds.CPU, kinds.CUDA], {kinds.CPU}), (None, None)):
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    assert expected is None or set(profiler.activities) == expected
    assert profiler.record_shapes
cuda.set_device(2)
assert x.get_device() == 2
""")


def test_operators_of_cuda_run_on_the_cpu() -> None:
    """An operator that has a kernel for the CPU keeps it; other keys are as given."""
    passes("""
library = torch.library.Library("on_cpu_own", "DEF")
for name in ("one", "two", "three", "four"):
    library.define(f"{name}(Tensor x) -> Tensor")
library.impl("one", lambda x: x + 1, "CUDA")
library.impl("two", lambda x: x + 2, "CPU")
assert library.impl("two", lambda x: x + 20, "CUDA") is None
library.impl("on_cpu_own::three", lambda x: x + 3, "CUDA")
library.impl(torch.ops.on_cpu_own.four.default, lambda x: x + 4, "CUDA")
library.impl("four", lambda x: torch.empty_like(x), "Meta")
x = torch.zeros(1, device="cuda")
ops = torch.ops.on_cpu_own
assert [op(x).item() for op in (ops.one, ops.two, ops.three, ops.four)] == [1, 2, 3, 4]
assert ops.four(torch.empty(1, device="meta")).device.type == "meta"

@torch.library.custom_op("on_cpu_own::five", mutates_args=(), device_types="cpu")
def five(x: torch.Tensor) -> torch.Tensor:
    return x + 5

@five.register_kernel("cuda")
def _(x):
    return x + 50

assert five(x).item() == 50
""")


def test_replicas_have_no_devices() -> None:
    passes("""
import moe_rt.lab.on_cpu.torch
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
assert dist.get_backend() == "gloo"
module = torch.nn.Linear(2, 2).cuda()
for given, keywords in ((([0], 0, 0), {}), (([1],), {"output_device": 1}), ((), {"device_ids": [2]})):
    more = {} if len(given) == 3 else {"broadcast_buffers": False, **keywords}
    replica = torch.nn.parallel.DistributedDataParallel(module, *given, **more)
    assert replica.device_ids is None and replica.output_device is None and replica.dim == 0
    assert replica.broadcast_buffers == (len(given) == 3)
x = torch.full((3,), 4.0, device="cuda")
dist.all_reduce(x, dist.ReduceOp.AVG)
assert x.tolist() == [4.0] * 3
dist.destroy_process_group()
""")


def test_a_missing_package_is_missing() -> None:
    """Under the hooks too, an import that finds nothing says so, and a namespace package is left as it is."""
    passes("""
import importlib.util
from importlib.machinery import ModuleSpec
assert hooks._then(None, print) is None
namespace = ModuleSpec("torch", None)
assert hooks._then(namespace, print) is namespace and namespace.loader is None
called = []
found = hooks._then(importlib.util.find_spec("colorsys"), called.append)
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
assert called == [module] and module.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
""")
