"""layout="tokens" under torch's dispatcher: contracts (opcheck), gradients (gradcheck), fakes, saved tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt import Buffer
from moe_rt.buffer.handle import Handle

T, MOST, H, K, E = 5, 9, 6, 2, 4


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": H, "num_topk": K, "num_experts": E}
    with Buffer(None, dtype=torch.float64, layout="tokens", **sizes) as b:
        yield b


def inputs(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=requires_grad)
    idx = torch.tensor([[0, 1], [2, -1], [3, 3], [0, 3], [1, 0]])
    return x, idx, torch.rand(T, K, dtype=torch.float64, requires_grad=requires_grad)


def experts(recv_x: Tensor, recv_weights: Tensor, handle: Handle) -> Tensor:
    """Apply one function for each expert, weight and add; rows without a token become zero, whatever they contain."""
    assert handle.recv_topk_idx is not None
    here = handle.recv_topk_idx >= 0
    real = (torch.arange(len(recv_x)) < handle.offs[-1])[:, None]
    factors = torch.where(here & real, recv_weights * (handle.recv_topk_idx + 1.0), 0.0).sum(1, keepdim=True)
    return torch.where(real, recv_x, 0.0).sin() * factors


def pair(buffer: Buffer, x: Tensor, idx: Tensor, w: Tensor, bound: int | None = None) -> Tensor:
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, w, max_tokens=bound)
    return buffer.combine(experts(recv_x, recv_weights, handle), None, handle)


def test_opcheck_of_every_op(buffer: Buffer) -> None:
    x, idx, w = inputs(requires_grad=True)
    engine = buffer._engine.id
    structure = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.moe_rt.dispatch, (x, idx, w, engine, 0, T), test_utils=structure)
    recv_x, recv_weights, offs, recv_plan, send_plan = torch.ops.moe_rt.dispatch(x, idx, w, engine, 0, T)
    assert offs.tolist() == [T]
    y, plans = recv_x.detach(), (recv_plan, send_plan)
    torch.library.opcheck(torch.ops.moe_rt.combine, (y.requires_grad_(), None, *plans, engine, 0))
    out = {"out": torch.zeros(T, H, dtype=torch.float64)}
    torch.library.opcheck(torch.ops.moe_rt.combine_out, (y.detach(), None, *plans, engine, 0), out)
    grads = (y.detach(), torch.rand_like(recv_weights))
    torch.library.opcheck(torch.ops.moe_rt.dispatch_backward, (*grads, *plans, engine, 0))
    torch.library.opcheck(torch.ops.moe_rt.combine_tokens_backward, (x.detach(), recv_plan, T, engine, 0))


def test_gradcheck_of_the_pair(buffer: Buffer) -> None:
    x, idx, w = inputs(requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: pair(buffer, x, idx, w), (x, w))


def test_second_derivative_is_refused(buffer: Buffer) -> None:
    x, idx, w = inputs(requires_grad=True)
    (grad,) = torch.autograd.grad(pair(buffer, x, idx, w).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_fakes_have_the_shapes_of_the_layout(buffer: Buffer) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(t) for t in inputs()]
        for bound in (1, T, None):
            recv_x, recv_weights, handle = buffer.dispatch(*fakes, max_tokens=bound)
            rows = bound or MOST
            assert recv_x.shape == (rows, H)
            assert recv_weights.shape == (rows, K)
            assert handle.offs.shape == (1,)
            assert handle.recv_topk_idx is not None
            assert handle.recv_topk_idx.shape == (rows, K)
            assert f", recv_topk_idx=[{rows}, {K}], device=" in repr(handle)
            assert buffer.combine(recv_x, None, handle).shape == (T, H)


@pytest.mark.parametrize("grad", [True, False])
def test_compiles_as_one_graph(buffer: Buffer, grad: bool) -> None:
    x, idx, w = inputs(requires_grad=grad)
    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True, backend="aot_eager")
    for bound in (T, None, 7):
        got, want = compiled(buffer, x, idx, w, bound), pair(buffer, x, idx, w, bound)
        torch.testing.assert_close(got, want)
        if grad:
            ones = torch.ones_like(got)
            got_grads, want_grads = (torch.autograd.grad(out, [x, w], ones) for out in (got, want))
            torch.testing.assert_close(got_grads, want_grads)


def test_combine_keeps_no_rows_for_its_backward(buffer: Buffer) -> None:
    x, idx, w = inputs(requires_grad=True)
    recv_x, _, handle = buffer.dispatch(x, idx, w)
    y = torch.zeros_like(recv_x).requires_grad_() * 2
    rows = weakref.ref(y)
    out = buffer.combine(y, None, handle)
    del y
    gc.collect()
    assert rows() is None
    out.sum().backward()
