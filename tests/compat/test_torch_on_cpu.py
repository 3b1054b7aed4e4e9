"""Devices that `moe-rt on-cpu` maps to the CPU, by each way of naming one: by position, by keyword, or not at all."""

from __future__ import annotations

import inspect
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.forked_python import run_python

from moe_rt.lab.on_cpu import hooks
from moe_rt.lab.on_cpu.hooks import NotOnCpu
from moe_rt.lab.on_cpu.torch import cpu_of, first_mapped, mapped
from moe_rt.lab.on_cpu.triton import fill

CUDA = torch.device("cuda", 1)


def given(*arguments: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, keywords


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (0, "cpu"),
        (3, "cpu"),
        ("cuda", "cpu"),
        ("cuda:1", "cpu"),
        ("cpu", "cpu"),
        ("meta", "meta"),
        ("cudagraphs", "cudagraphs"),
        (CUDA, torch.device("cpu")),
        (torch.device("meta"), torch.device("meta")),
        (None, None),
        (True, True),  # to(other, True) is non_blocking
    ],
)
def test_names_of_devices(device: Any, expected: Any) -> None:
    got = cpu_of(device)
    assert got == expected
    assert type(got) is type(expected)


def test_keywords() -> None:
    assert mapped(given)("cuda", device=CUDA, pin_memory=True) == (("cuda",), {"device": torch.device("cpu")})
    assert mapped(given)(device=None, other="cuda") == ((), {"device": None, "other": "cuda"})
    assert mapped(given, "map_location")(map_location="cuda:0", device="cuda") == (
        (), {"map_location": "cpu", "device": "cuda"},
    )  # fmt: skip


def test_names_of_a_triton_that_is_not_there() -> None:
    """Modules of kernels are imported, and compute sizes and configurations, without a compiler."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    fill(triton)
    fill(language)
    assert [triton.cdiv(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [triton.next_power_of_2(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
    config = triton.Config({"BLOCK": 32}, num_warps=4)
    assert (config.kwargs, config.num_warps) == ({"BLOCK": 32}, 4)
    assert triton.__version__.startswith("0.0")
    with pytest.raises(AttributeError, match="module 'triton' has no attribute '__path'"):
        getattr(triton, "__path")
    two = language.constexpr(language.constexpr(2))
    assert (int(two), two.value, "abc"[two], {two: 1}[2], two == language.constexpr(2)) == (2, 2, "c", 1, True)
    assert two
    assert not language.constexpr(0)


def test_what_a_triton_that_is_not_there_computes_is_refused() -> None:
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    fill(triton)
    fill(language)

    def twice(x: Any, n: Any) -> None:
        """Double x."""

    for make in (triton.jit, triton.jit(do_not_specialize=["n"]), triton.autotune(configs=[], key=["n"])):
        kernel = make(twice)
        assert (kernel.fn, kernel.__name__, kernel.__doc__, kernel.arg_names) == (
            twice,
            "twice",
            "Double x.",
            ["x", "n"],
        )
        assert triton.autotune(configs=[])(kernel) is kernel
        for call in (kernel, kernel.run, kernel.warmup, kernel[1,]):
            with pytest.raises(NotOnCpu, match=r"triton kernel twice \(.*test_torch_on_cpu\.py:\d+\): got a launch"):
                call(1, n=2)
    assert repr(language.math.exp) == "triton.language.math.exp"
    with pytest.raises(NotOnCpu, match=r"triton\.language\.math\.exp: got a call"):
        language.math.exp(1)
    with pytest.raises(AttributeError, match="__wrapped__"):
        language.exp.__wrapped__  # noqa: B018


@pytest.mark.parametrize("place", [0, 1])
def test_places(place: int) -> None:
    call = first_mapped(given, "kind", place)
    devices = ["cuda", "cuda:1", "cuda:2"]
    expected = ["cpu" if i == place else device for i, device in enumerate(devices)]
    for count in range(4):
        assert call(*devices[:count]) == (tuple(expected[:count]), {})
    assert call(*devices[:place], kind=CUDA, device="cuda") == (
        tuple(devices[:place]), {"kind": torch.device("cpu"), "device": "cuda"},
    )  # fmt: skip


PROGRAM = """
import torch
from moe_rt.lab.on_cpu import torch as on_cpu
torch._C._accelerator_getAccelerator = lambda real=torch.device("cuda"): real  # as if torch was built for CUDA
on_cpu.change()
assert torch.accelerator.current_accelerator() is None and not torch.accelerator.is_available()
x = torch.ones(2)
moves = [x.to("cuda"), x.to(device="cuda:0"), x.to(0), x.to("cuda", torch.float64), x.cuda(), x.cpu(), x.pin_memory()]
for moved in moves:
    assert moved.device.type == "cpu" and moved.data_ptr() != x.data_ptr(), "a move copies"
assert x.to("cuda", torch.float64).dtype == torch.float64
assert x.to(torch.float32) is x and x.to(x) is x and x.to(torch.float64).dtype == torch.float64
leaf = torch.ones(2, requires_grad=True)
assert leaf.to("cuda") is leaf and (leaf * 2).to("cuda").is_leaf is False
assert x.is_cuda and x.is_pinned() and not torch.ones(1, device="meta").is_cuda
assert x.new_zeros(3, device="cuda").shape == (3,)
assert torch.zeros(2, device=torch.device("cuda", 0), pin_memory=True).sum() == 0
assert torch.device("cuda") == torch.device("cpu") and isinstance(torch.device("cuda"), torch.device)
assert issubclass(type(torch.device("meta")), torch.device) and torch.device("meta").type == "meta"
assert torch.device() == torch.device(1) == torch.device(index=1, type="cuda") == torch.device("cpu")
assert torch.device(index=0, type="meta").type == torch.device(type="meta").type == "meta"
torch.set_default_device("cuda"); assert torch.ones(1).device.type == "cpu"; torch.set_default_device(None)
assert torch.Generator("cuda").device.type == "cpu" and isinstance(torch.Generator(), torch.Generator)
with torch.autocast("cuda"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16, "CUDA's default"
    assert torch.is_autocast_enabled("cuda")
with torch.autocast("cuda", torch.bfloat16):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
with torch.autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16, "the CPU's default"
assert torch.version.cuda
assert torch.nn.DataParallel(torch.nn.Linear(2, 3).cuda())(torch.ones(4, 2)).shape == (4, 3)
assert torch.cuda.FloatTensor([1, 2]).tolist() == [1, 2] and isinstance(torch.ones(1), torch.cuda.FloatTensor)
assert x.type("torch.cuda.HalfTensor").dtype == torch.half and x.type(torch.cuda.LongTensor).dtype == torch.long
assert x.type() == "torch.FloatTensor"
torch.set_default_tensor_type("torch.cuda.DoubleTensor"); assert torch.ones(1).dtype == torch.double
torch.set_default_tensor_type(torch.cuda.FloatTensor); assert torch.ones(1).dtype == torch.float
assert torch.get_device_module("cuda:1") is torch.cuda and torch.get_device_module("cpu") is torch.cpu
for options in ({}, {"devices": [0, 1]}, {"device_type": "cuda"}):
    torch.manual_seed(3)
    with torch.random.fork_rng(**options):
        forked = torch.rand(2)
    assert torch.equal(torch.rand(2), forked), options
print("passed")
"""


def test_what_programs_do_with_devices() -> None:
    done = run_python("-c", PROGRAM)
    assert done.stdout == "passed\n", done.stderr[-3000:]


CUDA_PROGRAM = """
import os, subprocess, sys, time
import torch
from moe_rt.lab.on_cpu import hooks
os.environ[hooks.DEVICES] = "3"
for _ in range(2):  # the second call changes nothing
    hooks.activate()
assert sum(isinstance(finder, hooks._Finder) for finder in sys.meta_path) == 1
cuda = torch.cuda
def refused(what, fn):
    try:
        fn()
    except hooks.NotOnCpu as error:
        assert what in str(error), error
    else:
        raise AssertionError(what)
assert cuda.is_available() and cuda.device_count() == 3 and len(cuda.default_generators) == 3
assert cuda.current_device() == 0
for device, index in ((2, 2), ("cuda:1", 1), ("cuda", 1), (None, 1), (-1, 0)):
    cuda.set_device(device)
    assert cuda.current_device() == index, device
cuda.set_device(1)
with cuda.device(2) as _:
    assert cuda.current_device() == 2
    with cuda.device("cuda:0"):
        assert cuda.current_device() == 0
    assert cuda.current_device() == 2 and torch.ones(1).get_device() == 2
assert cuda.current_device() == 1
refused("got device 3, expected one of 3", lambda: cuda.set_device(3))
ones = torch.ones(1)
for there in (lambda n: torch.ones(1, device=f"cuda:{n}"), lambda n: torch.ones(1, device=n), ones.cuda, ones.to,
              lambda n: ones.to(f"cuda:{n}"), lambda n: torch.device("cuda", n), torch.device,
              lambda n: torch.Generator(f"cuda:{n}")):
    there(2)
    refused("got cuda:3, expected one of 3", lambda: there(3))
assert cuda.get_device_properties(2).pci_bus_id == 2 and cuda.get_device_properties().pci_bus_id == 1
stream = cuda.Stream(2, priority=-1)
assert (stream.device_index, stream.priority, stream.query()) == (2, -1, True)
assert cuda.current_stream() is cuda.default_stream() and stream is not cuda.current_stream()
assert isinstance(stream.record_event(), cuda.Event)
given = cuda.Event(enable_timing=True)
assert stream.record_event(given) is given and given.query()
end = cuda.Event()
time.sleep(0.002)
end.record()
assert 1.9 < given.elapsed_time(end) < 60_000 and end.elapsed_time(given) < 0
refused("interprocess=True", lambda: cuda.Event(interprocess=True))
other = cuda.Stream()
with stream as inside, cuda.nvtx.range("a range"):
    assert inside is stream is cuda.current_stream()
    with cuda.stream(other), cuda.stream(None):
        assert cuda.current_stream() is other
    assert cuda.current_stream() is stream
assert cuda.current_stream() is cuda.default_stream()
page, limit = os.sysconf("SC_PAGE_SIZE"), 1 << 40
free, total = cuda.mem_get_info()
assert 1 << 20 < free < total < limit and total == cuda.get_device_properties().total_memory
assert 1 << 20 < cuda.memory_allocated() <= cuda.max_memory_allocated() < limit
before = cuda.memory_allocated()
large = torch.ones(1 << 23)
assert cuda.memory_allocated() - before > 1 << 24
cuda.manual_seed(5)
state, first = cuda.get_rng_state(), torch.rand(3)
cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3))
torch.manual_seed(5)
assert torch.equal(first, torch.rand(3))
cuda.set_rng_state_all(cuda.get_rng_state_all()); cuda.set_rng_state_all([])
for name in ("CUDAGraph", "graph", "make_graphed_callables", "MemPool"):
    refused(f"torch.cuda.{name}", getattr(cuda, name))
refused("cudart().cudaMemcpy", lambda: cuda.cudart().cudaMemcpy)
cuda.cudart().cudaProfilerStart()
code = "import torch, deep_ep; print(torch.ones(1, device='cuda').device, torch.cuda.device_count())"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
assert done.stdout == "cpu 3\\n", done.stderr
print("passed")
"""


def test_torch_cuda_once_torch_is_imported() -> None:
    done = run_python("-c", CUDA_PROGRAM)
    assert done.stdout == "passed\n", done.stderr[-3000:]


def test_a_changed_module_keeps_its_loader(tmp_path: Path) -> None:
    """Sources are still found through it, as by inspect and by warnings."""
    path, seen = tmp_path / "changed.py", list[ModuleType]()
    path.write_text("number = 3\n")
    spec = hooks._then(spec_from_file_location("changed", path), seen.append)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (seen, module.number) == ([module], 3)
    assert inspect.getsource(module) == spec.loader.get_source("changed") == path.read_text()  # type: ignore[attr-defined]


def test_deep_ep_keeps_its_own_name_and_spec() -> None:
    """An import under another name gives the same module, whose spec stays that of moe_rt."""
    spec = hooks._alias("deep_ep")
    assert spec is not None
    assert spec.loader is not None
    module = spec.loader.create_module(spec)
    assert module is not None
    own = module.__spec__
    try:
        module.__spec__ = spec  # as an import does
        spec.loader.exec_module(module)
        assert module.__spec__ is own is not spec
    finally:
        module.__spec__ = own
