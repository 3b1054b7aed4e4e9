"""The torch ops: contracts (opcheck), gradients (gradcheck), fakes, compile, and forbidden side effects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt import Buffer
from moe_rt.engine import engine
from moe_rt.nn.experts import grouped_linear, swiglu
from moe_rt.ops import grouped
from moe_rt.routes import ops as _ops_of_routes  # noqa: F401, which are checked also

T, H, K, E = 5, 6, 2, 4


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float64) as b:
        yield b


def inputs(requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=requires_grad)
    idx = torch.tensor([[0, 1], [2, -1], [3, 3], [-1, -1], [1, 0]])
    return x, idx, torch.rand(T, K, dtype=torch.float64, requires_grad=requires_grad)


def test_opcheck_of_every_op(buffer: Buffer) -> None:
    """Schema, autograd, fakes, and dynamic shapes pass through AOT dispatch.

    Every token visits K experts, so that no row of a receive buffer is unspecified and values can be compared.
    """
    x, _, w = inputs()
    idx = torch.tensor([[t % E, (t + 1) % E] for t in range(T)])
    engine = buffer._engine.id
    recv_x, recv_weights, offs, recv_plan, send_plan = torch.ops.moe_rt.dispatch(x, idx, w, engine, 0)
    assert offs[-1] == buffer.capacity
    y, rw = recv_x.detach().requires_grad_(), recv_weights.detach().requires_grad_()
    ops: dict[str, tuple[Any, ...]] = {
        "combine": (y, rw, recv_plan, send_plan, engine, 0),
        "dispatch_backward": (y.detach(), rw.detach(), recv_plan, send_plan, engine, 0),
        "combine_backward": (x.detach(), y.detach(), rw.detach(), recv_plan, engine, 0),
        "grouped_mm": (y, torch.randn(E, H, 8, dtype=torch.float64, requires_grad=True), offs),
        "grouped_add": (y, torch.randn(E, H, dtype=torch.float64, requires_grad=True), offs),
        "grouped_sum": (y.detach(), offs),
        "activate": ([y, y.detach()], offs, "geglu", False, 1.0, 1.0),
        "activate_backward": (y.detach(), [y.detach()] * 2, offs, "geglu", False, 1.0, 1.0),
        "swiglu": (y, offs),
        "swiglu_backward": (torch.randn(buffer.capacity, H // 2, dtype=torch.float64), y.detach(), offs),
    }
    for name, args in ops.items():
        torch.library.opcheck(getattr(torch.ops.moe_rt, name), args)
    # A plan's unused entries are unspecified also, so for dispatch itself only the structure can be compared.
    structure = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.moe_rt.dispatch, (x, idx, w, engine, 0), test_utils=structure)
    defined = {
        n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("moe_rt::")
    }
    # Tested in test_calls_compiled.py, test_rows_of_tokens_compiled.py, test_scaled_rows_compiled.py and tests/routes.
    elsewhere = {"combine_out", "combine_tokens_backward", "dispatch_scaled", "note_routes", "recorded_routes"}
    defined = {name for name in defined if not name.endswith(("_begin", "_finish"))}  # test_halves_compiled.py
    assert defined == {*ops, "dispatch", *elsewhere}, "every op of the library is checked"


def test_every_op_runs_on_cpus_and_gpus() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("moe_rt::")]
    assert len(names) > 10
    for name, key in itertools.product(names, ("CPU", "CUDA")):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


def test_gradcheck_of_the_pair(buffer: Buffer) -> None:
    _, idx, _ = inputs()

    def pair(x: Tensor, w: Tensor) -> Tensor:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
        n = int(handle.offs[-1])
        y = torch.zeros_like(recv_x)
        y[:n] = recv_x[:n].sin() * recv_weights[:n, None]  # weights are used twice: here, and in combine
        return buffer.combine(y, recv_weights, handle)

    x, _, w = inputs()
    assert torch.autograd.gradcheck(pair, (x, w))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0, 0], [0, 9, 0, 0]])
def test_expert_ops_match_a_loop_and_touch_only_real_rows(dtype: torch.dtype, sizes: list[int]) -> None:
    torch.manual_seed(0)
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    n = int(offs[-1])
    x = torch.randn(10, 8, dtype=dtype)
    x[n:] = float("nan")
    weight = torch.randn(4, 12, 8, dtype=dtype, requires_grad=True)
    x.requires_grad_()
    out = swiglu(grouped_linear(x, weight, offs), offs)
    groups = torch.split(x[:n], sizes)
    h = torch.cat([g @ weight[e].T for e, g in enumerate(groups)])
    expected = torch.nn.functional.silu(h[:, :6]) * h[:, 6:]
    torch.testing.assert_close(out[:n], expected)

    grad = torch.full_like(out, float("nan"))
    grad[:n] = torch.randn(n, 6, dtype=dtype)
    grads = torch.autograd.grad(out, [x, weight], grad)
    wanted = torch.autograd.grad(expected, [x, weight], grad[:n], allow_unused=True)
    torch.testing.assert_close(grads[0][:n], wanted[0][:n])
    torch.testing.assert_close(grads[1], wanted[1])


@pytest.mark.parametrize("hidden", [10, 3])
def test_sizes_that_the_grouped_kernel_refuses(hidden: int) -> None:
    """Products of rows that are not a multiple of 16 bytes use the loop, and are right."""
    offs = torch.tensor([2, 5], dtype=torch.int32)
    x, weight = torch.randn(5, hidden, requires_grad=True), torch.randn(2, 7, hidden, requires_grad=True)
    out = grouped_linear(x, weight, offs)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[1].T])
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, [x, weight], grad), torch.autograd.grad(expected, [x, weight], grad), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_that_the_cpu_has_no_instructions_for(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products compute in fp32 and round once, on any processor, over real rows only."""
    monkeypatch.setattr(grouped, "_cpu_multiplies", lambda dtype: False)
    monkeypatch.setattr(grouped.F, "grouped_mm", lambda *args, **kwargs: pytest.fail("the kernel was called"))
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    x, weight = torch.randn(6, 16).to(dtype), torch.randn(3, 8, 16).to(dtype)
    x[5:] = float("nan")
    x.requires_grad_(), weight.requires_grad_()
    out = grouped_linear(x, weight, offs)
    wide_x, wide_weight = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected = torch.cat([wide_x[:2] @ wide_weight[0].T, wide_x[2:5] @ wide_weight[2].T])
    assert torch.equal(out[:5], expected.to(dtype))
    grad = torch.full_like(out, float("nan"))
    grad[:5] = torch.randn(5, 8).to(dtype)
    grads = torch.autograd.grad(out, [x, weight], grad)
    wanted = torch.autograd.grad(expected, [wide_x, wide_weight], grad[:5].float())
    assert torch.equal(grads[0][:5], wanted[0][:5].to(dtype))
    assert torch.equal(grads[1], wanted[1].to(dtype))


def test_knows_what_the_cpu_multiplies() -> None:
    assert grouped._cpu_multiplies(torch.float32)
    assert grouped._cpu_multiplies(torch.float64)
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert not grouped._cpu_multiplies(torch.bfloat16)


def test_sum_of_an_output_has_a_gradient() -> None:
    """A bare sum() works, although its gradient is an expanded scalar, whose strides torch's kernel refuses."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(1, 8, 8, requires_grad=True)
    grouped_linear(x, weight, torch.tensor([4], dtype=torch.int32)).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach()[0].sum(0).expand(4, 8))


def test_outputs_are_fresh(buffer: Buffer) -> None:
    """A later op does not change an earlier op's results, whatever windows it reuses."""
    x, idx, w = inputs(requires_grad=False)
    first = buffer.dispatch(x, idx, w)
    n = int(first[2].offs[-1])
    copy = first[0][:n].clone()
    for i in range(4):
        recv_x, recv_weights, handle = buffer.dispatch(x + i + 1, idx, w)
        assert recv_x.data_ptr() != first[0].data_ptr()
        buffer.combine(recv_x, recv_weights, handle)
    assert torch.equal(first[0][:n], copy)
    torch.testing.assert_close(buffer.combine(*first), ((idx >= 0) * w).sum(1, keepdim=True) * x)


def test_fakes_have_static_shapes(buffer: Buffer) -> None:
    real = inputs(requires_grad=False)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fx, fidx, fw = (mode.from_tensor(t) for t in real)
        recv_x, recv_weights, handle = buffer.dispatch(fx, fidx, fw)
        assert recv_x.shape == (buffer.capacity, H)
        assert recv_weights.shape == (buffer.capacity,)
        assert handle.offs.shape == (E,)
        assert repr(handle).startswith(f"Handle(tag=0, offs=[{E}], recv_plan=[")
        assert buffer.combine(recv_x, recv_weights, handle).shape == (T, H)


class ForbidHostReads(TorchDispatchMode):
    """Fails on ops that make the host wait for values on a device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "_to_copy", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().split("::")[1].split(".")[0] not in self.FORBIDDEN, f"host read through {func.name()}"
        return func(*args, **(kwargs or {}))


def test_no_host_read_forward_and_backward(buffer: Buffer) -> None:
    x, idx, w = inputs()
    with ForbidHostReads():
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
        out = buffer.combine(recv_x, recv_weights, handle)
        assert repr(handle).endswith(f", send_plan=[{T}, {idx.shape[1]}], device='cpu')")
        torch.autograd.grad(out, [x, w], torch.ones_like(out))
    with pytest.raises(AssertionError, match="host read"), ForbidHostReads():
        int(handle.offs[-1])  # shows that the mode detects reads


def test_compile_keeps_values_and_gradients(buffer: Buffer) -> None:
    x, idx, w = inputs()

    def pair(x: Tensor, w: Tensor) -> Tensor:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
        return buffer.combine(swiglu(torch.cat([recv_x, recv_x], 1), handle.offs), recv_weights, handle)

    grad = torch.randn(T, H, dtype=torch.float64)
    eager = pair(x, w)
    compiled = torch.compile(pair, fullgraph=True)(x, w)
    torch.testing.assert_close(compiled, eager)
    for got, want in zip(
        torch.autograd.grad(compiled, [x, w], grad), torch.autograd.grad(eager, [x, w], grad), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_compiled_graph_is_not_found_again_for_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs with equal graph text and buffer counts but other capacities do not share cached graphs."""
    x, idx, w = inputs(requires_grad=False)
    sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float64, overflow="drop")
    with fresh_cache():
        for capacity_factor in (None, 2.0, 0.5):
            monkeypatch.setattr(engine, "_ids", itertools.count(1))
            torch._dynamo.reset()
            with Buffer(None, **sizes, capacity_factor=capacity_factor) as buffer:
                rows = torch.compile(lambda x: buffer.dispatch(x, idx, w)[0] * 1, fullgraph=True)(x)
                assert rows.shape == (buffer.capacity, H)
