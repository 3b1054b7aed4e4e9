"""An op goes through torch's dispatcher whenever a mode or transform could see or change it there, and only then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt import Buffer
from moe_rt.errors import InvalidInput
from moe_rt.ops import declare

T, H, K, E = 3, 4, 2, 4
SIZES: dict[str, Any] = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float64)
OPS = ["dispatch", "combine", "combine_backward", "dispatch_backward"]


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(None, **SIZES) as b:
        yield b


class Seen(TorchDispatchMode):
    """Records the names of moe_rt's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "moe_rt":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    return x, torch.tensor([[0, 1], [2, -1], [3, 0]]), torch.rand(T, K, dtype=torch.float64, requires_grad=True)


def there_and_back(buffer: Buffer) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of x and topk_weights."""
    x, idx, w = tokens()
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
    out = buffer.combine(recv_x, recv_weights, handle)
    return out, *torch.autograd.grad(out.cos().sum(), (x, w))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the ops that go through the dispatcher."""
    names: list[str] = []
    call = torch._ops.OpOverload.__call__

    def noting(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        names.extend([self._schema.name.split("::")[1]] if self.namespace == "moe_rt" else [])
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", noting)
    return names


@pytest.mark.parametrize(
    "state",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        torch.autograd.detect_anomaly,
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["plain", "no_grad", "inference_mode", "anomaly", "hooks on what is saved", "autocast", "default device"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_plain_eager_calls_go_past_it(
    buffer: Buffer, passes: list[str], state: Callable[[], AbstractContextManager[Any]]
) -> None:
    x, idx, w = tokens()
    with state():
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
        out = buffer.combine(recv_x, recv_weights, handle)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
    assert passes == []


def test_a_mode_sees_every_op_and_changes_nothing(buffer: Buffer, passes: list[str]) -> None:
    alone = there_and_back(buffer)
    with Seen() as seen:
        watched = there_and_back(buffer)
    assert seen.names == OPS
    assert set(passes) == set(OPS)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


class Called(TorchFunctionMode):
    """Records the names of moe_rt's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "moe_rt":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_every_op(buffer: Buffer) -> None:
    """It is not called in backward, which autograd runs."""
    alone = there_and_back(buffer)
    with torch.device("cpu"), Called() as called:
        watched = there_and_back(buffer)
    assert called.names[:2] == OPS[:2]
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_default_device_is_asked_nothing_by_the_engine(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, requires_grad: bool, in_halves: bool
) -> None:
    """It is a mode that Python would run for every attribute that the engine reads."""
    asked: list[str] = []
    run = DeviceContext.__torch_function__

    def noted(*given: Any, **named: Any) -> Any:
        asked.append(sys._getframe(1).f_code.co_filename)
        return run(*given, **named)

    monkeypatch.setattr(DeviceContext, "__torch_function__", noted)
    x, idx, w = (t.detach() if t.is_floating_point() and not requires_grad else t for t in tokens())
    with torch.device("meta"):
        if in_halves:
            received = buffer.dispatch(x, idx, w, wait=False).wait()
            out = buffer.combine(*received, wait=False).wait()
        else:
            out = buffer.combine(*buffer.dispatch(x, idx, w))
        if requires_grad:
            out.backward(torch.ones_like(out))
        assert torch.empty(1).is_meta
    assert asked
    # A second half checks its first input before the call.
    assert not [file for file in asked if "/moe_rt/engine/" in file and not file.endswith("/checks.py")]


def test_fakes_see_every_op(buffer: Buffer, passes: list[str]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, idx, w = tokens()
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
        assert buffer.combine(recv_x, recv_weights, handle).shape == x.shape
    assert set(OPS[:2]) <= set(passes)


def test_tensors_that_left_a_transform(buffer: Buffer) -> None:
    """torch.func.grad passes wrappers, which are dead when it has returned; autograd takes what is inside."""
    x, idx, w = tokens()
    kept: list[Tensor] = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x.detach())
    expected, _, handle = buffer.dispatch(x.detach(), idx, w)
    found, recv_weights, _ = buffer.dispatch(kept[0], idx, w)
    rows = int(handle.offs[-1])
    assert torch.equal(found[:rows], expected[:rows])
    buffer.combine(found, recv_weights, handle).sum().backward()
    assert w.grad is not None


def test_the_profiler_sees_every_op(buffer: Buffer) -> None:
    with torch.profiler.profile() as profile:
        there_and_back(buffer)
    assert {f"moe_rt::{name}" for name in OPS} <= {event.name for event in profile.events()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_the_op(buffer: Buffer) -> None:
    x, idx, w = (t.detach() for t in tokens())
    traced = torch.jit.trace(lambda x: buffer.dispatch(x, idx, w)[0], x, check_trace=False)
    assert "moe_rt::dispatch" in str(traced.graph)


class Marked(torch.Tensor):
    """A subclass without added behaviour."""


@pytest.mark.parametrize("wrap", [lambda x: x.as_subclass(Marked), torch.nn.Parameter], ids=["subclass", "parameter"])
def test_subclasses_go_through_it(buffer: Buffer, passes: list[str], wrap: Callable[[Tensor], Tensor]) -> None:
    x, idx, w = tokens()
    with torch.no_grad():
        buffer.dispatch(wrap(x.detach()), idx, w)
    assert "dispatch" in passes


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_transforms_of_functions_go_through_it(
    buffer: Buffer, passes: list[str], transform: Callable[[Any], Callable[[Tensor], Tensor]]
) -> None:
    """Transforms pass tensors that look plain; the ops go through the dispatcher all the same."""
    x, idx, w = (t.detach() for t in tokens())
    with pytest.raises(InvalidInput, match=r"under torch\.(func|vmap)"):
        transform(lambda x: buffer.dispatch(x, idx, w)[0].sum())(x)
    assert "dispatch" in passes


@pytest.mark.parametrize("watch", [nullcontext, Seen], ids=["past", "through"])
@pytest.mark.parametrize("layout", ["experts", "tokens"])
@pytest.mark.parametrize("used", [0, 1], ids=["recv_x", "recv_weights"])
def test_an_output_that_nobody_uses_adds_nothing(
    watch: Callable[[], AbstractContextManager[Any]], layout: Any, used: int
) -> None:
    """An unused output has no gradient, instead of a tensor of zeros, and adds nothing."""
    x, idx, w = tokens()
    with watch(), Buffer(None, **SIZES, layout=layout) as buffer:
        recv = buffer.dispatch(x, idx, w)
        n = int(recv[2].offs[-1])
        grads = torch.autograd.grad(recv[used][:n].sum(), (x, w), allow_unused=True)
    visits = (idx >= 0).double()
    rows = visits.amax(1, keepdim=True) if layout == "tokens" else visits.sum(1, keepdim=True)
    expected = rows.expand(T, H), visits
    assert torch.equal(grads[used], expected[used])
    assert not grads[1 - used].any()


def test_a_call_whose_gradients_nobody_wants_makes_no_node(
    buffer: Buffer, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without inputs that require gradients makes no autograd node, although gradients are recorded."""
    x, idx, w = tokens()
    for function in (declare.OPS["dispatch"].function, declare.OPS["combine"].function):
        monkeypatch.setattr(function, "forward", lambda *args: pytest.fail("a Function was called"))
    recv_x, recv_weights, handle = buffer.dispatch(x.detach(), idx, w.detach())
    assert buffer.combine(recv_x, recv_weights, handle).grad_fn is None
    assert passes == []
    for wanted in ((x, w.detach()), (x.detach(), w)):
        with pytest.raises(pytest.fail.Exception, match="a Function was called"):
            buffer.dispatch(wanted[0], idx, wanted[1])


@pytest.mark.parametrize("op", [0, 1], ids=["dispatch", "combine"])
def test_dual_numbers_go_through_it(buffer: Buffer, passes: list[str], op: int) -> None:
    """Dual numbers look plain, also without recorded gradients, but lose their tangents outside the dispatcher."""
    x, idx, w = (t.detach() for t in tokens())
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
    calls = lambda x: buffer.dispatch(x, idx, w)[0], lambda y: buffer.combine(y, recv_weights, handle)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual((x, recv_x)[op], torch.ones_like((x, recv_x)[op]))
        assert forward_ad.unpack_dual(calls[op](dual)).tangent is not None
    assert passes == [OPS[op]] * 2


@pytest.mark.parametrize("op", [0, 1], ids=["dispatch", "combine"])
def test_second_derivatives_are_refused(buffer: Buffer, op: int) -> None:
    """Second derivatives are refused instead of being zero."""
    x, idx, w = tokens()
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
    y = recv_x.detach().requires_grad_()
    out, leaf = ((recv_x[:5], x), (buffer.combine(y, recv_weights, handle), y))[op]
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(InvalidInput, match="got a second derivative"):
        grad.sum().backward()


def test_unwatched_is_asked_of_every_argument() -> None:
    assert declare.unwatched(torch.ones(1), torch.ones(1))
    assert not declare.unwatched(torch.ones(1), torch.nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("watch", [nullcontext, Seen], ids=["past", "through"])
def test_a_tensor_on_another_device_is_refused_either_way(
    buffer: Buffer, watch: Callable[[], AbstractContextManager[Any]]
) -> None:
    """The op is refused in and outside the dispatcher, in which torch would select another kernel."""
    x, idx, w = tokens()
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, w)
    with watch():
        with pytest.raises(InvalidInput, match=r"x: got .* on meta, expected .* on cpu"):
            buffer.dispatch(x.to("meta"), idx, w)
        with pytest.raises(InvalidInput, match=r"y: got .* on meta, expected .* on cpu"):
            buffer.combine(recv_x.to("meta"), recv_weights, handle)
