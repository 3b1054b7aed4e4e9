"""Calls of the CUDA driver in order, on a stand-in: code that is loaded and shared, contexts, words of failures."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device.jit_tools import require_compiler

from moe_rt.engine.gpu import driver, jit, nvrtc
from moe_rt.engine.gpu.driver import CudaModule, Gpu
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM
from moe_rt.errors import InvalidConfig, LaunchFailed
from moe_rt.memory import nvshmem

DEVICE = torch.device("cuda", 3)


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222


class Driver:
    """The bindings of the driver. `fails` maps a call to what it returns instead of success."""

    CUresult = CUresult
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared bytes")

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: dict[str, CUresult] = {}
        self.version = 99000

    def _call(self, name: str, *given: Any, returns: Any = ()) -> tuple[Any, ...]:
        self.calls.append((name, *given))
        return self.fails.get(name, CUresult.CUDA_SUCCESS), *returns

    def cuCtxGetCurrent(self) -> Any:
        return self._call("cuCtxGetCurrent", returns=("the context",))

    def cuCtxSetCurrent(self, context: str) -> Any:
        return self._call("cuCtxSetCurrent", context)

    def cuModuleLoadData(self, code: bytes) -> Any:
        return self._call("cuModuleLoadData", code, returns=(77,))

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        return self._call("cuModuleGetFunction", module, name, returns=(1000 + len(name),))

    def cuFuncLoad(self, function: int) -> Any:
        return self._call("cuFuncLoad", function)

    def cuFuncSetAttribute(self, function: int, attribute: str, value: int) -> Any:
        return self._call("cuFuncSetAttribute", function, attribute, value)

    def cuGetProcAddress(self, call: bytes, version: int, flags: int) -> Any:
        return self._call("cuGetProcAddress", call, version, flags, returns=(len(call), "found"))

    def cuDriverGetVersion(self) -> Any:
        return self._call("cuDriverGetVersion", returns=(self.version,))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return the driver; torch's current device is 3, and switching it is noted among the driver's calls."""
    require_compiler()
    made = Driver()

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        made.calls.append(("enter", which))
        yield
        made.calls.append(("leave", which))

    monkeypatch.setattr("cuda.bindings.driver", made, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.calls.append("current stream"))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    return made


def module(**how: Any) -> CudaModule:
    return CudaModule(b"code", ["one", "three"], DEVICE, **{"nvshmem": False, **how})


LOADED = [
    ("enter", DEVICE),
    "current stream",
    ("cuCtxGetCurrent",),
    ("cuModuleLoadData", b"code"),
    ("cuModuleGetFunction", 77, b"one"),
    ("cuModuleGetFunction", 77, b"three"),
    ("cuFuncLoad", 1003),
    ("cuFuncLoad", 1005),
]
LAUNCH = ("cuGetProcAddress", b"cuLaunchKernel", 12000, 0)
LAUNCH_EX = ("cuGetProcAddress", b"cuLaunchKernelEx", 12000, 0)


def test_kernels_are_loaded_before_any_is_launched(fake: Driver) -> None:
    module()
    assert fake.calls == [*LOADED, LAUNCH, ("leave", DEVICE)]


def test_shared_memory_is_allowed_kernel_by_kernel(fake: Driver) -> None:
    module(own_shared={"three": 204800, "one": 102400})
    allowed = [
        ("cuFuncSetAttribute", 1005, "shared bytes", 204800),
        ("cuFuncSetAttribute", 1003, "shared bytes", 102400),
    ]
    assert fake.calls == [*LOADED, *allowed, LAUNCH, ("leave", DEVICE)]


@pytest.mark.parametrize(("version", "early"), [(12029, False), (12030, True), (13000, True)])
def test_launches_depend_on_each_other_if_the_driver_knows_how(fake: Driver, version: int, early: bool) -> None:
    fake.version = version
    module(dependent=True)
    asked = [LAUNCH, ("cuDriverGetVersion",), *([LAUNCH_EX] if early else [])]
    assert fake.calls == [*LOADED, *asked, ("leave", DEVICE)]


def test_nvshmem_learns_of_a_module_whose_kernels_call_it(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "register_module", lambda which: fake.calls.append(("register", which)))
    module(nvshmem=True)
    assert fake.calls == [*LOADED, LAUNCH, ("register", 77), ("leave", DEVICE)]


@pytest.mark.parametrize(
    "call",
    ["cuCtxGetCurrent", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuFuncSetAttribute",
     "cuGetProcAddress", "cuDriverGetVersion"],
)  # fmt: skip
def test_a_call_that_fails_is_named(fake: Driver, call: str) -> None:
    fake.fails[call] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(LaunchFailed) as raised:
        module(dependent=True, own_shared={"one": 1})
    expected = f"{call}: got CUDA_ERROR_INVALID_VALUE from the CUDA driver, expected success"
    assert raised.value.args[0] == expected
    assert fake.calls[-1][0] == call, "nothing is done after it"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls of C++, which launch all kernels, and say so with (number of launched ones, code)."""
    seen: list[Any] = []
    seen_result = SimpleNamespace(value=(9, 0))

    def launch(*given: Any) -> tuple[int, int]:
        seen.append(given)
        return seen_result.value

    monkeypatch.setattr(driver._engine, "launch", launch)
    launch.result = seen_result  # type: ignore[attr-defined]
    return seen


def queue(made: CudaModule, *names: str) -> int:
    """Launch kernels with 1, 2, ... blocks; return the address of the arguments."""
    params = (ctypes.c_void_p * 2)(1, 2)
    blocks = [(name, number) for number, name in enumerate(names, 1)]
    made.launch(blocks, threads=96, shared_bytes=40, stream=5, params=params)
    return ctypes.addressof(params)


@pytest.mark.parametrize("dependent", [False, True])
def test_an_op_is_one_call_of_c(fake: Driver, launched: list[Any], dependent: bool) -> None:
    made = module(dependent=dependent, own_shared={"three": 800})
    del fake.calls[:]
    params = queue(made, "one", "three", "one")
    grids = [(1003, 1, 40), (1005, 2, 800), (1003, 3, 40)]
    assert launched == [(len("cuLaunchKernel"), len("cuLaunchKernelEx") * dependent, grids, 96, 5, params)]
    assert fake.calls == [("cuCtxSetCurrent", "the context")]


def test_a_context_is_bound_once_on_each_thread(fake: Driver, launched: list[Any]) -> None:
    made = module()
    del fake.calls[:]
    for _ in range(2):
        queue(made, "one")
    thread = threading.Thread(target=queue, args=(made, "one"))
    thread.start()
    thread.join()
    assert fake.calls == [("cuCtxSetCurrent", "the context")] * 2
    assert len(launched) == 3


def test_a_context_that_could_not_be_bound_is_bound_by_the_next_launch(fake: Driver, launched: list[Any]) -> None:
    made = module()
    fake.fails["cuCtxSetCurrent"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(LaunchFailed, match="cuCtxSetCurrent: got CUDA_ERROR_INVALID_VALUE"):
        queue(made, "one")
    assert launched == []
    fake.fails.clear()
    queue(made, "one")
    assert fake.calls[-2:] == [("cuCtxSetCurrent", "the context")] * 2
    assert len(launched) == 1


def test_another_current_device_is_switched_for_a_launch(
    fake: Driver, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module()
    del fake.calls[:]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    params = queue(made, "three")
    assert fake.calls == [("enter", DEVICE), ("cuCtxSetCurrent", "the context"), ("leave", DEVICE)]
    assert launched == [(len("cuLaunchKernel"), 0, [(1005, 1, 40)], 96, 5, params)]


@pytest.mark.parametrize(("queued", "name"), [(0, "one"), (1, "three")])
def test_the_kernel_that_was_refused_is_named(fake: Driver, launched: list[Any], queued: int, name: str) -> None:
    made = module()
    driver._engine.launch.result.value = (queued, 1)  # type: ignore[attr-defined]
    with pytest.raises(LaunchFailed, match=f"^{name}: got CUDA_ERROR_INVALID_VALUE from the CUDA driver"):
        queue(made, "one", "three")


NEW = "install a newer driver, or a compiler as old as this one: "
CUDA_12 = f"{NEW}pip uninstall --yes nvshmem4py-cu13 && pip install"


@pytest.mark.parametrize(
    ("version", "compiler", "known", "advice"),
    [
        (12040, (13, 0), "12.4", CUDA_12),
        (12090, (13, 1), "12.9", CUDA_12),
        (13000, (13, 1), "13.0", f"{NEW}pip install 'nvidia-cuda-nvrtc==13.0.*'"),
        (12040, (12, 8), "12.4", f"{NEW}pip install 'nvidia-cuda-nvrtc-cu12==12.4.*'"),
        (13020, (13, 2), "", ""),
        (13030, (13, 2), "", ""),
        (14000, (13, 2), "", ""),
    ],
)
@pytest.mark.parametrize("error", [code for code in CUresult if code.value >= 200], ids=lambda code: code.name)
def test_a_driver_older_than_the_compiler_is_told_what_to_install(
    fake: Driver, monkeypatch: pytest.MonkeyPatch, version: int, compiler: Any, known: str, advice: str, error: Any
) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: compiler)
    fake.version, fake.fails["cuModuleLoadData"] = version, error
    with pytest.raises(LaunchFailed) as raised:
        module()
    text = raised.value.args[0]
    if not advice:
        assert text == f"cuModuleLoadData: got {error.name} from the CUDA driver, expected success"
        return
    made = ".".join(map(str, compiler))
    got = f"cuModuleLoadData: got {error.name} from a driver for CUDA {known}, expected one for {made}, as NVRTC is; "
    assert text.startswith(got + advice)


@pytest.fixture
def gpu() -> Gpu:
    """A Gpu of compute capability 9.0, without the facts that torch knows of it."""
    made = Gpu.__new__(Gpu)
    made.device, made.arch = DEVICE, "sm_90a"
    return made


def test_a_gpu_uses_its_own_device_and_streams(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **how: asked.append((sizes, how)))
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    gpu.zeros(48)
    gpu.synchronize()
    assert asked == [((48,), {"dtype": torch.uint8, "device": DEVICE}), DEVICE]
    assert (gpu.stream(), gpu.current()) == (43, ("stream of", DEVICE))
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert gpu.is_capturing() is capturing


class Loaded:
    """Takes the place of a CudaModule."""

    def __init__(self, *given: Any, **how: Any) -> None:
        self.given, self.how = given, how


def test_kernels_are_compiled_for_the_gpu_and_loaded_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_kernels(source: str, arch: str, defines: Any, *, library: Any) -> Any:
        compiled.append((source, arch, defines, library))
        return SimpleNamespace(cubin=source.encode(), resources={"a": None, "b": None})

    monkeypatch.setattr(jit, "compile_kernels", compile_kernels)
    monkeypatch.setattr(driver, "CudaModule", Loaded)
    monkeypatch.setattr(driver, "modules", {})
    monkeypatch.delenv("MOE_RT_DEPENDENT_LAUNCHES", raising=False)
    plain: Any = gpu.kernels("x.cu", {"A": 1})
    assert compiled == [("x.cu", "sm_90a", {"A": 1}, None)]
    assert plain.given == (b"x.cu", ["a", "b"], DEVICE)
    assert plain.how == {"nvshmem": False, "dependent": True, "own_shared": {}}
    assert gpu.kernels("x.cu", {"A": 1}) is plain
    own: Any = gpu.kernels("x.cu", {"A": 1}, own_shared={"a": 8})
    assert own is not plain
    assert own.how == {"nvshmem": False, "dependent": True, "own_shared": {"a": 8}}
    assert gpu.kernels("x.cu", {}, own_shared={"a": 8}) is own
    assert gpu.kernels("x.cu", {}, own_shared={"a": 9}) is not own
    monkeypatch.setenv("MOE_RT_DEPENDENT_LAUNCHES", "0")
    independent: Any = gpu.kernels("x.cu", {})
    assert independent.how["dependent"] is False
    for library in (NVSHMEM, NCCL):
        first: Any = gpu.kernels("x.cu", {}, library=library)
        assert compiled[-1] == ("x.cu", "sm_90a", {}, library)
        assert first.how["nvshmem"] is (library is NVSHMEM)
        assert gpu.kernels("x.cu", {}, library=library) is not first, "a module of one start of the library"


@pytest.mark.parametrize(
    ("arch", "value", "may"),
    [
        ("sm_90a", None, True),
        ("sm_90a", "1", True),
        ("sm_90a", "0", False),
        ("sm_89", None, False),
        ("sm_89", "1", False),
    ],
)
def test_who_may_begin_early(monkeypatch: pytest.MonkeyPatch, arch: str, value: str | None, may: bool) -> None:
    monkeypatch.delenv("MOE_RT_DEPENDENT_LAUNCHES", raising=False)
    if value is not None:
        monkeypatch.setenv("MOE_RT_DEPENDENT_LAUNCHES", value)
    assert driver.may_depend(arch) is may


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, str | None], None]:
    """Return no_gpu(error, hidden): torch's start fails with `error`, and CUDA_VISIBLE_DEVICES is `hidden`."""

    def prepare(error: str | None, hidden: str | None) -> None:
        def init() -> None:
            if error is not None:
                raise RuntimeError(error)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)

    return prepare


@pytest.mark.parametrize(
    ("error", "hidden", "says"),
    [
        (None, None, ""),
        ("No CUDA GPUs are available", None, "; torch says: No CUDA GPUs are available"),
        (
            "Found no driver (Triggered internally)\nmore",
            "",
            "; torch says: Found no driver, with CUDA_VISIBLE_DEVICES=''",
        ),
        ("two\nlines", "4,5", "; torch says: two, with CUDA_VISIBLE_DEVICES='4,5'"),
    ],
)
def test_why_torch_can_use_no_gpu(no_gpu: Any, error: str | None, hidden: str | None, says: str) -> None:
    no_gpu(error, hidden)
    assert driver.why_there_is_none() == says
    for device in ("cuda", "cuda:1", "cpu"):
        with pytest.raises(InvalidConfig) as raised:
            Gpu(device)
        assert raised.value.args[0] == f"device: got {device}, expected a CUDA device that torch can use{says}"


def test_a_torch_without_cuda_says_so(no_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu("not asked", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert driver.why_there_is_none() == f"; torch {torch.__version__} is built without CUDA"


def test_a_cpu_is_no_gpu_and_a_torch_that_knows_no_room_for_rings_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(InvalidConfig, match="device: got cpu, expected a CUDA device"):
        Gpu("cpu")
    facts = SimpleNamespace(major=9, minor=0, name="a card", multi_processor_count=7, uuid="its id")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert Gpu("cuda:2").bulk_bytes == 0
