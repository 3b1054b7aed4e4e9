"""Options of a single call under torch's dispatcher: schemas, fakes, torch.compile, and gradients of out=."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import lowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt import Buffer
from moe_rt.errors import InvalidInput
from moe_rt.ops import compile as in_order

T, MOST, H, K, E = 5, 9, 6, 2, 4


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, num_max_tokens_per_rank=MOST, hidden=H, num_topk=K, num_experts=E, dtype=torch.float64) as b:
        yield b


def inputs(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs in which every token visits K experts, so that with T as the bound no row is unspecified."""
    torch.manual_seed(0)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=requires_grad)
    idx = torch.tensor([[t % E, (t + 1) % E] for t in range(T)], dtype=torch.int32)
    return x, idx, torch.rand(T, K, dtype=torch.float64, requires_grad=requires_grad)


def test_opcheck(buffer: Buffer) -> None:
    x, idx, w = inputs(requires_grad=True)
    engine = buffer._engine.id
    structure = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.moe_rt.dispatch, (x, idx, w, engine, 0, T), test_utils=structure)
    recv_x, recv_weights, _, *plans = torch.ops.moe_rt.dispatch(x, idx, w, engine, 0, T)
    assert recv_x.shape == (T * K, H)
    args = (recv_x.detach(), recv_weights.detach(), *plans, engine, 0)
    torch.library.opcheck(torch.ops.moe_rt.combine, args)
    torch.library.opcheck(torch.ops.moe_rt.combine_out, args, {"out": torch.zeros(T, H, dtype=torch.float64)})
    fewer, _, offs, *plans = torch.ops.moe_rt.dispatch(x, idx, w, engine, 0)
    n = int(offs[-1])
    assert n < len(fewer)
    y, weights = fewer[:n].detach().requires_grad_(), torch.rand(len(fewer), dtype=torch.float64)
    torch.library.opcheck(torch.ops.moe_rt.combine, (y, weights, *plans, engine, 0))


def test_fakes_have_the_shapes_of_the_bound(buffer: Buffer) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(t) for t in inputs()]
        for bound in (1, T, None):
            recv_x, recv_weights, handle = buffer.dispatch(*fakes, max_tokens=bound)
            assert recv_x.shape == (K * (bound or MOST), H)
            assert recv_weights.shape == (K * (bound or MOST),)
            out = fakes[0].new_empty(T, H)
            assert buffer.combine(recv_x, recv_weights, handle, out=out) is out


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_calls_of_several_bounds(buffer: Buffer, grad: bool) -> None:
    x, idx, w = inputs(requires_grad=grad)

    def pair(x: Tensor, w: Tensor, bound: int | None) -> Tensor:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w, max_tokens=bound)
        return buffer.combine(recv_x * 2, recv_weights, handle) + len(recv_x)

    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True)
    for bound in (T, None, 7, MOST):
        got, want = compiled(x, w, bound), pair(x, w, bound)
        torch.testing.assert_close(got, want)
        if grad:
            ones = torch.ones_like(got)
            for a, b in zip(
                torch.autograd.grad(got, [x, w], ones), torch.autograd.grad(want, [x, w], ones), strict=True
            ):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("bound", [None, T, 7])
@pytest.mark.parametrize("trained", ["recv_x", "recv_weights"])
def test_rows_or_weights_without_gradients(buffer: Buffer, trained: str, bound: int | None, halves: bool) -> None:
    """Zeros that take the place of the other's gradient have the size of this call."""
    x, idx, w = inputs(requires_grad=True)
    if halves:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w, max_tokens=bound, wait=False).wait()
    else:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w, max_tokens=bound)
    rows, weights = (recv_x, recv_weights.detach()) if trained == "recv_x" else (recv_x.detach(), recv_weights)
    buffer.combine(rows, weights, handle).sum().backward()
    if trained == "recv_x":
        assert w.grad is None or not w.grad.any()
        torch.testing.assert_close(x.grad, w.detach().sum(1, keepdim=True).expand(T, H))
    else:
        assert x.grad is None or not x.grad.any()
        torch.testing.assert_close(w.grad, x.detach().sum(1, keepdim=True).expand(T, K))


def test_compiled_out(buffer: Buffer) -> None:
    """A compiled combine writes the caller's tensor, a view of it also, and later reads see the result."""
    x, idx, w = inputs()

    def pair(x: Tensor, memory: Tensor) -> Tensor:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w, max_tokens=T)
        before = memory.sum()
        buffer.combine(recv_x * 2, recv_weights, handle, out=memory[1 : T + 1])
        return before + memory

    torch._dynamo.reset()
    memory, expected = (torch.ones(T + 2, H, dtype=torch.float64) for _ in range(2))
    want = pair(x, expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(pair, fullgraph=True)(x, memory), want)
    assert torch.equal(memory, expected)
    torch.testing.assert_close(memory[1:-1], 2 * w.sum(1, keepdim=True) * x)


@pytest.mark.parametrize("which", ["y", "recv_weights", "out"])
@pytest.mark.parametrize("through", ["buffer", "dispatcher"])
def test_out_has_no_gradients(buffer: Buffer, which: str, through: str) -> None:
    """A combine into out= is refused before the op if gradients are recorded; it gets no sequence number."""
    recv_x, recv_weights, handle = buffer.dispatch(*inputs())
    args: dict[str, Any] = {"y": recv_x, "recv_weights": recv_weights, "out": torch.zeros(T, H, dtype=torch.float64)}
    args[which] = args[which].detach().requires_grad_()
    plans = (handle.recv_plan, handle.send_plan, buffer._engine.id, 0)

    def call() -> None:
        if through == "buffer":
            buffer.combine(args["y"], args["recv_weights"], handle, out=args["out"])
        else:
            torch.ops.moe_rt.combine_out(args["y"], args["recv_weights"], *plans, out=args["out"])

    with pytest.raises(InvalidInput, match="out: got a combine that gradients are recorded of"):
        call()
    assert not args["out"].any()
    with torch.no_grad():
        call()
    assert args["out"].any()


def test_what_was_saved_for_a_gradient_is_not_overwritten_unseen(buffer: Buffer) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*inputs())
    out, factor = torch.zeros(T, H, dtype=torch.float64), torch.ones(T, H, dtype=torch.float64, requires_grad=True)
    product = factor * out
    with torch.no_grad():
        buffer.combine(recv_x, recv_weights, handle, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_dispatcher_refuses_a_bound_that_is_no_integer(buffer: Buffer) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(t) for t in inputs()]
        wrong: Any = "5"
        with pytest.raises(InvalidInput, match="max_tokens: got '5', expected an integer"):
            buffer.dispatch(*fakes, max_tokens=wrong)


def test_compiled_ops_get_tensors_with_the_strides_that_were_traced() -> None:
    """Inductor may choose other strides for the inputs of an op without such a constraint, and the op refuses them."""
    op = torch.ops.moe_rt.combine.default
    in_order.kept_in_order([op], lambda: None)()
    exact = lowering.tag_to_layout_constraint(torch._C.Tag.needs_exact_strides)
    assert lowering.maybe_layout_constraints(op) is exact is not None


class LoweredGraph:
    """A graph of Inductor that is being lowered, as far as ops are kept in order."""

    def __init__(self) -> None:
        self.operations: list[Any] = []
        self.additional_buffer_deps: dict[str, set[str]] = defaultdict(set)

    def lower(self, *names: str) -> None:
        named = [SimpleNamespace(get_name=lambda n=n: n, get_operation_name=lambda n=n: n) for n in names]
        self.operations.extend(named)


def test_each_op_of_a_graph_comes_after_the_one_before() -> None:
    """Outputs of an op are operations of their own; ops of another graph do not count."""
    for graph in (LoweredGraph(), LoweredGraph()):
        lower = in_order._after_previous_op(graph.lower)
        with V.set_graph_handler(graph):
            for names in (("a", "its output"), ("b",), ("c",), ("d",)):
                lower(*names)
                graph.lower(f"a product after {names[0]}")
        assert graph.additional_buffer_deps == {"b": {"its output"}, "c": {"b"}, "d": {"c"}}
        assert [o.get_name() for o in graph.operations if hasattr(o, "has_side_effects")] == ["a", "its output", *"bcd"]
