"""The real nvshmem.core accepts the calls of the heap, as far as can be checked without a GPU."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heap import fake_nvshmem
from heap.fake_nvshmem import Cluster, Core

from moe_rt.extras import how_to_install
from moe_rt.memory import nvshmem


@pytest.fixture(scope="module")
def core() -> Any:
    try:
        return importlib.import_module("nvshmem.core")
    except ImportError as error:
        reason = f"the NVSHMEM heap needs its package, pip install '.[cuda]': {error}"
        if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def used() -> set[str]:
    """Return every attribute of nvshmem.core that the heap uses."""
    tree = ast.parse(Path(nvshmem.__file__).read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {a.attr for a in attributes if ast.unparse(a.value) in ("self._core", "core")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_stand_in_has_the_signatures_of_the_real_one(core: Any) -> None:
    standin = Core(Cluster(1), 0)
    assert {"init", "buffer", "free", "get_peer_buffer", "quiet"} < used()
    for name in used():
        real, ours = getattr(core, name), getattr(standin, name)
        if inspect.isfunction(real):
            assert parameters(ours) == parameters(real), name
    real, ours = core.NvshmemKernelObject.from_handle, standin.NvshmemKernelObject.from_handle
    assert parameters(ours) == parameters(real)
    for real, ours in [
        (core.InitStatus, standin.InitStatus),
        (core._internal_tracking.InternalInitStatus, fake_nvshmem.InternalInitStatus),
    ]:
        assert {s.name: int(s) for s in real} == {s.name: int(s) for s in ours}
    assert issubclass(core.NvshmemError, Exception)
    assert core._internal_tracking._is_initialized["status"] in core._internal_tracking.InternalInitStatus


def test_the_unique_id_has_the_size_that_travels(core: Any) -> None:
    uid = core.get_unique_id(empty=True)
    assert uid._data.nbytes == nvshmem.UNIQUE_ID_BYTES
    before = ctypes.string_at(uid.ptr, nvshmem.UNIQUE_ID_BYTES)
    ctypes.memmove(uid.ptr, before[::-1], len(before))
    assert uid._data.tobytes() == before[::-1]


def test_cuda_core_has_what_is_used(core: Any) -> None:
    cuda_core = importlib.import_module("cuda.core")
    assert "Buffer.fill(self, value: int" in cuda_core.Buffer.fill.__doc__
    assert "*, stream:" in cuda_core.Buffer.fill.__doc__.splitlines()[0]
    for owner, names in ((cuda_core.Buffer, ["handle", "size"]), (cuda_core.Device, ["default_stream", "set_current"])):
        assert all(hasattr(owner, name) for name in names)
    assert hasattr(cuda_core.Stream, "__cuda_stream__"), "what quiet() asks of a stream"


WITHOUT_A_GPU = """
import torch
from heap.fake_nvshmem import HostGpu
from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.extras import how_to_install
from moe_rt.memory import nvshmem
gpu = HostGpu()
for device in ("cpu", "cuda:0", "cuda"):
    gpu.device = torch.device(device)
    try:
        nvshmem.allocate(ThreadGroup.make(1)[0], 100, 5.0, gpu)
    except InvalidConfig as error:
        print(device, error)
"""


def run(code: str) -> list[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_without_a_gpu_it_is_refused(core: Any) -> None:
    lines = run(WITHOUT_A_GPU)
    assert lines[0].startswith('cpu heap "nvshmem": got memory on cpu, expected a CUDA device')
    for line, device in zip(lines[1:], ("cuda:0", "cuda"), strict=True):
        assert line.startswith(f'{device} heap "nvshmem": got ')
        assert f"a CUDA driver and {device}; pip install" in line


def test_without_the_package_it_is_refused_and_nothing_imports_it() -> None:
    hidden = "import sys\nsys.modules['nvshmem'] = sys.modules['nvshmem.core'] = None\n"
    lines = run(hidden + WITHOUT_A_GPU)
    assert "expected NVSHMEM's package, a CUDA driver and" in lines[1]
    assert f"; {how_to_install('cuda')} (moe-rt docs " in lines[1]
    check = "import moe_rt, moe_rt.memory.nvshmem, sys; print({'nvshmem', 'cuda.core'} & set(sys.modules) or 'none')"
    assert run(check) == ["none"]
