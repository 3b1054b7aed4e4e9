"""The real nccl.core accepts the calls of the heap over NCCL, as far as can be checked without a GPU."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from heap import fake_nccl
from heap.fake_nccl import Cluster, Core
from heap.fake_nvshmem import Fabric, HostGpu

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.memory import gin


@pytest.fixture(scope="module")
def core() -> Any:
    try:
        return importlib.import_module("nccl.core")
    except ImportError as error:
        reason = f"the heap over NCCL needs its package, pip install nccl4py: {error}"
        if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def used(owners: set[str]) -> set[str]:
    """Return every attribute of these modules that the heap uses."""
    tree = ast.parse(Path(gin.__file__).read_text())
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) in owners}


def parameters(function: Any) -> list[tuple[str, Any]]:
    named = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in named if p.name != "self"]


def test_the_stand_in_has_the_signatures_of_the_real_one(core: Any) -> None:
    standin = Core(Cluster(1), 0)
    functions = used({"core", "self._core"}) - {"Communicator", "get_version"}
    assert {"get_unique_id", "mem_alloc", "mem_free", "WindowFlag", "UniqueId"} < functions
    for name in functions:
        real, ours = getattr(core, name), getattr(standin, name)
        if inspect.isfunction(real):
            assert parameters(ours) == parameters(real), name
    for real, ours in [
        (core.WindowFlag, fake_nccl.WindowFlag),
        (core.NcclGinConnectionType, fake_nccl.NcclGinConnectionType),
    ]:
        assert {member.name: int(member.value) for member in ours}.items() <= {
            member.name: int(member.value) for member in real
        }.items()
    made = core.NCCLDevCommRequirements(gin_connection_type=core.NcclGinConnectionType.FULL)
    assert made.gin_connection_type == core.NcclGinConnectionType.FULL
    assert parameters(core.Communicator.init) == parameters(standin.Communicator.init)


def test_communicators_and_windows_have_what_is_used(core: Any) -> None:
    cluster = Cluster(1)
    ours = fake_nccl.Communicator(Core(cluster, 0), Fabric(1, cluster), 0)  # type: ignore[arg-type]
    for name in used({"group.comm"}) - {"properties"}:
        assert parameters(getattr(ours, name)) == parameters(getattr(core.Communicator, name)), name
    flags = core.WindowFlag.COLL_SYMMETRIC | core.WindowFlag.STRICT_ORDERING
    assert flags.value == 3, "one value for both"
    buffer = fake_nccl.Buffer(64)
    window = ours.register_window(buffer, fake_nccl.WindowFlag(3))
    assert used({"window"}) == {"handle", "get_peer_device_pointer"}
    real = core.RegisteredWindowHandle
    assert isinstance(real.handle, property)
    assert parameters(window.get_peer_device_pointer) == parameters(real.get_peer_device_pointer)
    assert isinstance(core.DevCommResource.ptr, property)
    known = core.NCCLCommProperties.__dataclass_fields__
    assert used({"known"}) == {"gin_connection_type", "dev_comm_runtime_version_size"} <= set(known)


def test_the_unique_id_travels_as_bytes(core: Any) -> None:
    text = bytes(range(128))
    assert bytes(core.UniqueId.from_bytes(text)) == text


def test_buffers_are_seen_as_tensors() -> None:
    buffer = importlib.import_module("cuda.core").Buffer
    assert hasattr(buffer, "__dlpack__")
    assert hasattr(buffer, "__dlpack_device__")
    ours = fake_nccl.Buffer(64)
    seen = torch.utils.dlpack.from_dlpack(ours)
    assert (seen.data_ptr(), seen.dtype, seen.shape) == (ours.handle, torch.int8, (64,))
    assert ctypes.string_at(ours.handle, 1) == bytes([fake_nccl.GARBAGE])


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_without_a_gpu_it_is_refused(core: Any, device: str) -> None:
    with pytest.raises(InvalidConfig, match="pip install" if device != "cpu" else "expected a CUDA device") as refused:
        gin.World().allocate(ThreadGroup.make(1)[0], 100, 5.0, SimpleNamespace(**vars(HostGpu(device=device))))
    assert str(refused.value).startswith('heap "gin": got ')


@pytest.mark.parametrize(("found", "got"), [(None, "no library of NCCL"), ("2.29.7", "NCCL 2.29.7, /x/libnccl.so.2")])
def test_an_old_library_is_refused(core: Any, monkeypatch: pytest.MonkeyPatch, found: str | None, got: str) -> None:
    version = importlib.import_module("packaging.version").Version
    library = found and SimpleNamespace(version=version(found), path=Path("/x/libnccl.so.2"))
    monkeypatch.setattr(core, "get_version", lambda: SimpleNamespace(libnccl=library))
    with pytest.raises(InvalidConfig, match=rf"got {got}, expected 2.32 or newer; pip install --no-deps 'nvidia-nccl"):
        gin.load(torch.device("cuda", 0))
    for newer in ("2.32", "2.32.0", "2.32.3", "2.33.1", "3.0.1"):
        library = SimpleNamespace(version=version(newer), path=Path("/x/libnccl.so.2"))
        assert gin.load(torch.device("cuda", 0)) is core


@pytest.mark.parametrize(("cuda", "major"), [("12.8", 12), ("13.0", 13), (None, 13)])
def test_the_package_to_install_is_that_of_torchs_cuda(
    core: Any, monkeypatch: pytest.MonkeyPatch, cuda: str | None, major: int
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(core, "get_version", lambda: {}["libnccl"])
    with pytest.raises(InvalidConfig) as raised:
        gin.load(torch.device("cuda", 0))
    install = f"pip install --no-deps 'nvidia-nccl-cu{major}>=2.32' && pip install nccl4py"
    assert raised.value.args[0] == f"heap \"gin\": got KeyError: 'libnccl'; expected NCCL's package; {install}"
