"""Declared ops: their schemas, and what they do alike past torch's dispatcher and in it: tags, bounds and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt import Buffer
from moe_rt.errors import InvalidInput, MoeRtError, Op
from moe_rt.ops import declare, table

T, H, K, E = 3, 4, 2, 4
SIZES = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float64)
BACK = "Tensor recv_plan, Tensor send_plan, int engine, int tag"
SCHEMAS = {
    "dispatch": "Tensor x, Tensor topk_idx, Tensor topk_weights, int engine, int tag, int? max_tokens=None",
    "dispatch_scaled": (
        "Tensor x, Tensor? scales, Tensor topk_idx, Tensor topk_weights, int engine, int tag, int? max_tokens=None"
    ),
    "combine": f"Tensor y, Tensor? recv_weights, {BACK}",
    "dispatch_backward": f"Tensor grad_recv_x, Tensor grad_recv_weights, {BACK}",
    "combine_backward": "Tensor grad_out, Tensor y, Tensor recv_weights, Tensor recv_plan, int engine, int tag",
    "combine_tokens_backward": "Tensor grad_out, Tensor recv_plan, SymInt num_rows, int engine, int tag",
}
OUTPUTS = {"dispatch": 5, "dispatch_scaled": 6, "combine": 1, "combine_tokens_backward": 1}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


WAYS: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext, Watching, torch.profiler.profile]
ways = pytest.mark.parametrize("way", WAYS, ids=["past", "through", "profiled"])


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, **SIZES) as made:
        yield made


def tokens(requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(T, n, generator=generator, dtype=torch.float64) for n in (H, K))
    return (
        x.requires_grad_(requires_grad),
        torch.tensor([[0, 1], [2, -1], [3, 0]]),
        weights.requires_grad_(requires_grad),
    )


def test_schemas_are_those_that_saved_graphs_hold() -> None:
    """A half has its op's arguments: the first returns a ticket, and the second takes it and returns the results."""
    expected = {}
    for name, inputs in SCHEMAS.items():
        number = OUTPUTS.get(name, 2)
        outputs = "Tensor" if number == 1 else f"({', '.join(['Tensor'] * number)})"
        expected[name] = f"{name}({inputs}) -> {outputs}"
        expected[f"{name}_begin"] = f"{name}_begin({inputs}) -> Tensor"
        expected[f"{name}_finish"] = f"{name}_finish(Tensor ticket, {inputs}) -> {outputs}"
    expected["combine_out"] = f"combine_out(Tensor y, Tensor? recv_weights, {BACK}, *, Tensor(a!) out) -> ()"
    assert {name: op.schema() for name, op in declare.OPS.items()} == expected
    for name, text in expected.items():
        assert str(getattr(torch.ops.moe_rt, name).default._schema) == f"moe_rt::{text}"
        made = getattr(table, name)
        assert made.__name__ == name
        assert made.__doc__.startswith(f"Run torch.ops.moe_rt.{name}. ")
    assert table.combine_begin.__doc__ == "Run torch.ops.moe_rt.combine_begin. Start it, and return its ticket."
    assert table.combine_finish.__doc__ == "Run torch.ops.moe_rt.combine_finish. Wait for it."


@ways
@pytest.mark.parametrize("in_halves", [False, True])
def test_a_tag_is_that_of_all_four_ops(buffer: Buffer, way: Any, in_halves: bool) -> None:
    """Errors and reports name a layer by it."""
    x, idx, weights = tokens()
    with way():
        if in_halves:
            with torch.no_grad():
                received = buffer.dispatch(x, idx, weights, tag=5, wait=False).wait()
                buffer.combine(*received, wait=False).wait()
            assert [(op.op, op.tag) for op in buffer.report().ranks[0].last_ops] == [("dispatch", 5), ("combine", 5)]
            return
        out = buffer.combine(*buffer.dispatch(x, idx, weights, tag=5))
        out.sum().backward()
    found = [(op.op, op.tag) for op in buffer.report().ranks[0].last_ops]
    assert found == [(name, 5) for name in ("dispatch", "combine", "combine_backward", "dispatch_backward")]


@ways
def test_results_are_alike(buffer: Buffer, way: Any) -> None:
    """Outputs and gradients are those of a sum over experts that double their rows."""
    x, idx, weights = tokens()
    with way():
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        out = buffer.combine(recv_x * 2, recv_weights, handle)
        into = torch.empty(T, H, dtype=torch.float64)
        with torch.no_grad():
            assert buffer.combine(recv_x * 2, recv_weights, handle, out=into) is into
    expected = 2 * ((idx >= 0) * weights).sum(1, keepdim=True) * x
    torch.testing.assert_close(out, expected)
    assert torch.equal(into, out)
    grad = torch.arange(float(T * H), dtype=torch.float64).view(T, H)
    got, want = (torch.autograd.grad(y, [x, weights], grad) for y in (out, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bound", [None, 1, 2, 3])
def test_shapes_follow_the_bound_of_a_call(bound: int | None) -> None:
    """Fakes, on which graphs are built, have the shapes of the real results."""
    with Buffer(None, **SIZES) as buffer:
        x, idx, weights = (t[:1] for t in tokens(False))
        real = buffer.dispatch(x, idx, weights, max_tokens=bound)
        with FakeTensorMode() as mode:
            fake = buffer.dispatch(*(mode.from_tensor(t) for t in (x, idx, weights)), max_tokens=bound)
        for got, want in ((fake[0], real[0]), (fake[1], real[1])):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
        for name in ("offs", "recv_plan", "send_plan"):
            got, want = getattr(fake[2], name), getattr(real[2], name)
            assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        assert len(real[0]) == K * (bound or T)


def calls(buffer: Buffer) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return each op that a buffer calls with its inputs by the names that errors give them."""
    x, idx, weights = tokens(False)
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
    out = torch.empty(T, H, dtype=torch.float64)
    return {
        "dispatch": (
            lambda **given: buffer.dispatch(given["x"], given["topk_idx"], given["topk_weights"]),
            {"x": x, "topk_idx": idx, "topk_weights": weights},
        ),
        "combine": (
            lambda **given: buffer.combine(given["y"], given["recv_weights"], handle),
            {"y": recv_x, "recv_weights": recv_weights},
        ),
        "combine into": (
            lambda **given: buffer.combine(given["y"], given["recv_weights"], handle, out=given["out"]),
            {"y": recv_x, "recv_weights": recv_weights, "out": out},
        ),
    }


@pytest.mark.parametrize("op", ["dispatch", "combine", "combine into"])
def test_refusals_are_alike(buffer: Buffer, op: str) -> None:
    """An input of another kind, device or dtype is named, and the buffer stays usable."""
    call, given = calls(buffer)[op]
    for name, t in given.items():
        for wrong in (None, t.numpy(), t.to_sparse(), t.to("meta"), t.to(torch.complex64)):
            if wrong is None and name in ("recv_weights", "out"):
                continue
            for way in WAYS[:2]:
                with way(), pytest.raises(MoeRtError) as raised:
                    call(**{**given, name: wrong})
                assert str(raised.value).startswith(f"{name}: got ")
    call(**given)


BY_HAND: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "dispatch_backward": lambda e, t: torch.ops.moe_rt.dispatch_backward(t[0], t[1], t[3], t[4], e, 0),
    "combine_backward": lambda e, t: torch.ops.moe_rt.combine_backward(t[5], t[0], t[1], t[3], e, 0),
}


@pytest.mark.parametrize("op", BY_HAND)
def test_gradients_have_no_derivatives(buffer: Buffer, op: str) -> None:
    x, idx, weights = tokens(False)
    engine = buffer._engine.id
    results = [*torch.ops.moe_rt.dispatch(x, idx, weights, engine, 0), torch.ones(T, H, dtype=torch.float64)]
    leaf = 5 if op == "combine_backward" else 0
    trained = list(results)
    trained[leaf] = results[leaf].clone().requires_grad_()
    message = f"^{op}: got a second derivative, expected first ones only"
    with pytest.raises(InvalidInput, match=message) as raised:
        BY_HAND[op](engine, trained)[0].sum().backward()
    assert (raised.value.rank, raised.value.op) == (0, Op[op.upper()])
    with torch.no_grad(), forward_ad.dual_level():
        trained[leaf] = forward_ad.make_dual(results[leaf], torch.ones_like(results[leaf]))
        with pytest.raises(InvalidInput, match=message):
            BY_HAND[op](engine, trained)
    BY_HAND[op](engine, results)


@ways
def test_what_would_lose_gradients_is_refused(buffer: Buffer, way: Any) -> None:
    """Combine into a tensor, halves and token windows have none."""
    x, idx, weights = tokens()
    with torch.no_grad():
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
    out, trained = torch.empty(T, H, dtype=torch.float64), recv_x.clone().requires_grad_()

    def window(rows: Tensor, factors: Tensor) -> Any:
        return buffer.dispatch(buffer.token_window(T).copy_(rows), idx, factors)

    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: buffer.combine(trained, recv_weights, handle, out=out),
            "out: got a combine that gradients are recorded",
        ),
        (lambda: buffer.combine(recv_x, recv_weights.clone().requires_grad_(), handle, out=out), "out: got a combine"),
        (lambda: window(x, weights.detach()), "x: got a token window in a dispatch that gradients are recorded of"),
        (lambda: window(x.detach(), weights), "x: got a token window in a dispatch that gradients are recorded of"),
    ]
    for call, text in refused:
        with way(), pytest.raises(InvalidInput) as raised:
            call()
        assert str(raised.value).startswith(text)
    with way(), torch.no_grad():
        assert buffer.combine(trained, recv_weights, handle, out=out) is out
        window(x, weights)
    with way():
        window(x.detach(), weights.detach())


def test_a_window_is_no_matter_of_traces(buffer: Buffer) -> None:
    """Tensors without memory are in no window, and a transform is refused as ever."""
    x, idx, weights = tokens()
    buffer.token_window(T)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, idx, weights)]
        assert buffer.dispatch(*fakes)[0].shape == (T * K, H)
    with pytest.raises(InvalidInput, match=r"got a gradient under torch\.func"):
        torch.func.grad(lambda rows: buffer.dispatch(rows, idx, weights)[0].sum())(x.detach())
    buffer.token_window(T)
    step = torch.compile(lambda rows: buffer.dispatch(rows, idx, weights)[0] * 1, fullgraph=True, backend="eager")
    with pytest.raises(InvalidInput, match="x: got rows that a graph has copied from a token window"):
        step(x)


def test_which_tensors_autograd_would_record() -> None:
    plain, trained = torch.ones(1), torch.ones(1, requires_grad=True)
    assert declare.recorded(plain, None, trained)
    assert not declare.recorded(plain, None)
    assert not declare.recorded()
    with torch.no_grad():
        assert not declare.recorded(trained)
