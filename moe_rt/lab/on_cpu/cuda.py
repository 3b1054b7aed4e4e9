"""torch.cuda on CPU ranks: devices, streams, events, memory and random numbers; graphs are refused by name."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from moe_rt.lab.on_cpu.hooks import NotOnCpu, num_devices

_current = {"device": 0}
_MULTIPROCESSORS, _CAPABILITY, _NCCL = 132, (9, 0), (2, 27, 3)
_NAME = "CPU rank of moe-rt on-cpu"


def _index(device: Any) -> int:
    if device is None:
        return _current["device"]
    if isinstance(device, int):
        return device
    text = str(device)
    return int(text.partition(":")[2] or _current["device"])


def _existing(name: str, device: Any) -> int:
    """Return a device's number, if there are as many."""
    index = _index(device)
    if index >= num_devices():
        expected = f"one of {num_devices()} (moe-rt on-cpu --ranks)"
        raise NotOnCpu(f"torch.cuda.{name}: got device {index}, expected {expected}")
    return index


def set_device(device: Any) -> None:
    """Make a device the current one, if there are as many."""
    _current["device"] = max(_existing("set_device", device), 0)


class on_device(contextlib.ContextDecorator):
    """torch.cuda.device: the current device inside a block."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = _current["device"]
        set_device(self.idx)

    def __exit__(self, *error: Any) -> None:
        _current["device"] = self.prev_idx


class Stream:
    """torch.cuda.Stream: everything on it is done when it is issued."""

    def __init__(self, device: Any = None, priority: int = 0, **keywords: Any) -> None:
        self.device_index, self.priority = _index(device), priority
        self.stream_id, self.device_type = int(keywords.get("stream_id", 0)), 1
        self.device, self.cuda_stream = torch.device("cpu"), 0

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before = _current_stream()
        set_stream(self)
        return self

    def __exit__(self, *error: Any) -> None:
        set_stream(self._before)


class Event:
    """torch.cuda.Event: a time on the host's clock."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self._at = 0.0
        if interprocess:
            raise NotOnCpu("torch.cuda.Event: got interprocess=True, expected events of one process")

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_default_stream = Stream()
_streams = threading.local()  # `current` is the current stream of a thread


def _current_stream(device: Any = None) -> Any:
    return getattr(_streams, "current", _default_stream)


def set_stream(stream: Any) -> None:
    """Make a stream the current one of this thread; None changes nothing."""
    if stream is not None:
        _streams.current = stream


class StreamContext:
    """torch.cuda.StreamContext: a block whose work goes to a stream, or with None to the current one."""

    def __init__(self, stream: Any) -> None:
        self.stream, self._before = stream, None

    def __enter__(self) -> None:
        self._before = _current_stream()
        set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        set_stream(self._before)


def _memory() -> tuple[int, int]:
    """Return the free and total bytes of this host."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _resident(device: Any = None) -> int:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak(device: Any = None) -> int:
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident())


def _stats(device: Any = None) -> OrderedDict[str, int]:
    """Return the statistics that programs print, of this process."""
    now, peak = _resident(), _peak()
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes")
    stats = {f"{kind}.all.{when}": size for kind in kinds for when, size in (("current", now), ("peak", peak))}
    return OrderedDict(stats | {"num_alloc_retries": 0, "num_ooms": 0})


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=_NAME, major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=_memory()[1],
        multi_processor_count=_MULTIPROCESSORS, warp_size=32, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=52428800,
        is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="",
        pci_bus_id=_existing("get_device_properties", device), pci_device_id=0, pci_domain_id=0, clock_rate=1_000_000,
        memory_clock_rate=1_000_000, memory_bus_width=64,
    )  # fmt: skip


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _refuse(name: str) -> NoReturn:
    raise NotOnCpu(f"torch.cuda.{name}: got a use of it on CPU ranks, which have none; expected a path without it")


def _refused(name: str) -> Any:
    """Return a class that can be named and subclassed but not made or called."""

    def refuse(cls: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        _refuse(name)

    return type(name, (), {"__new__": refuse, "__doc__": "Raises NotOnCpu."})


def _initialise() -> NoReturn:
    """Raise NotOnCpu for a function of torch.cuda that has no equivalent here; it would start CUDA."""
    _refuse(sys._getframe(1).f_code.co_name)


def _nothing(*arguments: Any, **keywords: Any) -> None: ...


class _NoStream:
    """torch.cuda.cudart and similar objects: any use is refused by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name in ("cudaProfilerStart", "cudaProfilerStop"):
            return _nothing
        _refuse(f"{self._name}().{name}")


def change() -> None:
    """Replace torch.cuda's functions in this process."""
    values: dict[str, Any] = {
        # Devices.
        "is_available": lambda: True, "is_initialized": lambda: True, "init": _nothing, "_lazy_init": _initialise,
        "_is_in_bad_fork": lambda: False, "device_count": num_devices, "current_device": lambda: _current["device"],
        "set_device": set_device, "device": on_device, "device_of": lambda t: on_device(None), "synchronize": _nothing,
        "get_device_properties": _properties, "get_device_name": lambda device=None: _NAME,
        "get_device_capability": lambda device=None: _CAPABILITY, "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *a, **k: True, "can_device_access_peer": lambda a, b: True,
        "_sleep": _nothing, "set_sync_debug_mode": _nothing, "get_sync_debug_mode": lambda: 0,
        "cudart": lambda: _NoStream("cudart"), "ipc_collect": _nothing,
        # Streams and events.
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "current_stream": _current_stream,
        "default_stream": lambda device=None: _default_stream, "set_stream": set_stream, "stream": StreamContext,
        "StreamContext": StreamContext,
        "is_current_stream_capturing": lambda: False,
        # Memory: that of this process and host.
        "mem_get_info": lambda device=None: _memory(), "memory_allocated": _resident, "memory_reserved": _resident,
        "max_memory_allocated": _peak, "max_memory_reserved": _peak, "memory_cached": _resident,
        "max_memory_cached": _peak, "memory_stats": _stats,
        "memory_summary": lambda *a, **k: _NAME, "memory_snapshot": lambda *a, **k: [], "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing, "reset_accumulated_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing, "reset_max_memory_cached": _nothing,
        "set_per_process_memory_fraction": _nothing, "memory_usage": lambda device=None: 0,
        "utilization": lambda device=None: 0,
        # Random numbers are those of the CPU, which makes all tensors.
        "manual_seed": _seed, "manual_seed_all": _seed, "seed": lambda: _seed(torch.initial_seed()),
        "seed_all": lambda: _seed(torch.initial_seed()), "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]) if states else None,
        "default_generators": (torch.default_generator,) * num_devices(),
    }  # fmt: skip
    for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
        values[f"{kind}Tensor"] = getattr(torch, f"{kind}Tensor")
    for name, value in values.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, value)
    _refuse_names()
    vars(torch.cuda.nccl)["version"] = lambda: _NCCL
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _nothing)
    torch.cuda.nvtx.range = _on_range


def _refuse_names() -> None:
    """Make graphs, pools and memory histories raise by name."""
    for name in (
        "CUDAGraph",
        "graph",
        "make_graphed_callables",
        "graph_pool_handle",
        "MemPool",
        "CUDAPluggableAllocator",
    ):
        setattr(torch.cuda, name, _refused(name))
    torch.cuda.graphs.CUDAGraph = torch.cuda.CUDAGraph  # type: ignore[misc]
    for name in ("_record_memory_history", "_dump_snapshot", "_snapshot"):
        setattr(torch.cuda.memory, name, _refused(f"memory.{name}"))


@contextlib.contextmanager
def _on_range(*arguments: Any, **keywords: Any) -> Iterator[None]:
    yield
