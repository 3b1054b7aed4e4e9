"""No code between router and output waits for the device: neither the layer nor the engine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from device.fake_cuda_tensors import SYNCS, build_guard
from support.emulated_gpu import EmulatedGpu
from support.forked_python import run_python
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch.utils._python_dispatch import TorchDispatchMode

import moe_rt.nn.layer  # noqa: F401  registers the ops of experts
from moe_rt import Buffer, ThreadGroup

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def guard() -> Path:
    return build_guard()


def trace(guard: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_python(HERE / "trace_cuda_job.py", guard, *options)


def test_layer_traces_without_a_sync(guard: Path) -> None:
    """Forward and backward contain no data-dependent op and no op that leaves the device."""
    result = trace(guard)
    assert result.returncode == 0, result.stderr
    ops = [line.split() for line in result.stdout.splitlines()]
    names = {op[0] for op in ops}
    both_ways = {f"moe_rt.{name}.default" for name in ("dispatch", "combine", "dispatch_backward", "combine_backward")}
    assert both_ways <= names, names
    assert {"moe_rt.grouped_mm.default", "moe_rt.swiglu.default", "moe_rt.swiglu_backward.default"} <= names
    assert not [op for op in ops if any(sync in op[0] for sync in SYNCS)]
    assert {device for op in ops for device in op[1:]} == {"cuda"}, [op for op in ops if op[1:] != ["cuda"]]


def test_a_sync_is_noticed(guard: Path) -> None:
    result = trace(guard, "syncing")
    assert result.returncode != 0
    assert "_local_scalar_dense" in result.stderr


class Forbidden(TorchDispatchMode):
    """Allows ops that queue work or allocate; an op that could read a value raises."""

    allowed = ("aten.empty", "aten.new_empty", "aten.detach", "aten.view", "aten.clone", "aten.alias", "moe_rt.")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(func).startswith(self.allowed), f"{func} on the way of an op"
        return func(*args, **(kwargs or {}))


@pytest.mark.emulated("forbids copies")
def test_engine_only_makes_outputs_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA engine's Python code, on the emulated GPU, makes two launches an op and no torch op but empty."""
    gpu = EmulatedGpu()
    spec = make_spec(1, dtype=torch.bfloat16)
    inputs = make_inputs(spec, [12], seed=0)
    with Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(spec)) as buffer:
        gpu.launched.clear()
        for name in ("synchronize", "upload", "zeros", "host_bytes"):
            monkeypatch.setattr(gpu, name, lambda *_, name=name: pytest.fail(f"{name} on the way of an op"))
        x, weights = inputs.xs[0].requires_grad_(), inputs.topk_weights[0].requires_grad_()
        with Forbidden():
            recv_x, recv_weights, handle = buffer.dispatch(x, inputs.topk_idx[0], weights)
            out = buffer.combine(recv_x, recv_weights, handle)
        grad = torch.ones_like(out)
        recv_plan, send_plan = handle.recv_plan, handle.send_plan
        with Forbidden():
            engine, y, w = buffer._engine, recv_x.detach(), recv_weights.detach()
            grad_y, grad_w = engine.combine_backward(grad, y, w, recv_plan, handle.tag)
            engine.dispatch_backward(grad_y, grad_w, recv_plan, send_plan, handle.tag)
    sends = ["dispatch", "combine", "combine_backward", "combine"]
    assert gpu.launched == [f"{op}_{half}" for op in sends for half in ("send", "receive")] + ["leave"]


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_ops_have_kernels(key: str) -> None:
    """Every op has a kernel for this key; fakes and the emulated GPU would not notice a missing one."""
    ops = ("dispatch", "combine", "dispatch_backward", "combine_backward", "swiglu", "swiglu_backward", "grouped_mm")
    missing = [op for op in ops if not torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_rt::{op}", key)]
    assert not missing
