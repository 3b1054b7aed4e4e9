"""The one call that checks an op's tensors accepts only plain ones; any other is checked again, one by one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rt import Buffer, _engine
from moe_rt.buffer.handle import Handle
from moe_rt.config.spec import ELEMENTS
from moe_rt.errors import InvalidInput

T, H, K, E, PLAN = 3, 8, 2, 4, 50
DTYPES = list(ELEMENTS)


def reader(dtype: torch.dtype = torch.float32, by_token: bool = False, **changes: Any) -> _engine.TensorReader:
    shape = _engine.Shape(
        num_ranks=1, num_experts=E, num_max_tokens=T, hidden=H, num_topk=K, elem_bytes=dtype.itemsize,
        by_token=by_token, alignment=1, num_pushed_tokens=0, num_pushed_rows=0, sums=0, depth=1, node_of=[],
    )  # fmt: skip
    usual = dict(tensor=Tensor, elem=ELEMENTS[dtype], plan_ints=PLAN, on_cuda=False, device_index=0, vector_bytes=1)
    return _engine.TensorReader(shape=shape, **usual | changes)


def dispatched(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    weights = torch.zeros(T, K, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    return {"x": torch.zeros(T, H, dtype=dtype), "topk_idx": torch.zeros(T, K, dtype=torch.int64), "weights": weights}


def combined(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    weights = torch.zeros(7, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    plans = torch.zeros(PLAN, dtype=torch.int32), torch.zeros(T, K, dtype=torch.int32)
    return {"y": torch.zeros(5, H, dtype=dtype), "recv_weights": weights, "recv_plan": plans[0], "send_plan": plans[1]}


def backward(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    given = combined(dtype)
    return {"grad_out": torch.zeros(T, H, dtype=dtype), **{n: given[n] for n in ("y", "recv_weights", "recv_plan")}}


def strided(t: Tensor) -> Tensor:
    """Return a tensor that equals t, with other numbers between its elements."""
    return torch.stack([t, t], -1)[..., 0]


ODD: dict[str, Callable[[Tensor], Any]] = {
    "another dtype": lambda t: t.to(torch.int16),
    "dtype of another kind": lambda t: t.to(torch.int32 if t.is_floating_point() else torch.float32),
    "one column more": lambda t: t.new_zeros(*t.shape[:-1], t.shape[-1] + 1),
    "one row more": lambda t: t.new_zeros(t.shape[0] + 1, *t.shape[1:]),
    "one dimension more": lambda t: t.unsqueeze(-1),
    "one dimension less": lambda t: t[0],
    "scalar": lambda t: t.flatten()[0],
    "strided": strided,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "owes sign": lambda t: torch._neg_view(t) if t.is_floating_point() else None,
    "no memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "part of no memory": lambda t: torch._efficientzerotensor((t.shape[0] + 9, *t.shape[1:]), dtype=t.dtype)[9:],
    "None": lambda t: None,
    "list": lambda t: t.tolist(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_tensors(dtype: torch.dtype) -> None:
    given, returned = dispatched(dtype), combined(dtype)
    assert reader(dtype).dispatch(*given.values()) == T
    assert reader(dtype).combine(*returned.values()) == (5, 7, T)
    assert reader(dtype).combine_backward(*backward(dtype).values())
    given["topk_idx"] = given["topk_idx"].to(torch.int32)
    assert reader(dtype).dispatch(*given.values()) == T
    assert reader(dtype).dispatch(*(t[:0] for t in given.values())) == 0
    assert reader(dtype).dispatch(*(t[::2][:1] for t in given.values())) == 1  # a single row's stride has no meaning
    for other in DTYPES:
        if other is not dtype:
            assert reader(other).dispatch(*given.values()) == -1
            assert reader(other).combine(*returned.values()) is None
            assert not reader(other).combine_backward(*backward(dtype).values())


def test_rows_of_tokens() -> None:
    given = combined()
    assert reader(by_token=True).combine(given["y"], None, given["recv_plan"], given["send_plan"]) == (
        5, _engine.ANY_CAPACITY, T,
    )  # fmt: skip
    assert reader(by_token=True).combine(*given.values()) is None
    given["recv_weights"] = torch.zeros(7, K)
    assert reader(by_token=True).combine(*given.values()) == (5, 7, T)
    assert reader().combine(*given.values()) is None
    assert not reader(by_token=True).combine_backward(*backward().values())


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", dispatched())
def test_what_is_not_plain_in_a_dispatch(odd: str, name: str) -> None:
    given: dict[str, Any] = dispatched()
    narrow_ids = name == "topk_idx" and odd == "dtype of another kind"
    given[name] = given[name].float() if narrow_ids else ODD[odd](given[name])
    assert reader().dispatch(*given.values()) == -1


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", combined())
def test_what_is_not_plain_in_a_combine(odd: str, name: str) -> None:
    given = with_odd(combined(), odd, name)
    without_weights = (name, odd) == ("recv_weights", "None")  # layout "tokens"
    if given is not None and not without_weights:
        assert reader().combine(*given.values()) is None


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", backward())
def test_what_is_not_plain_in_a_combine_backward(odd: str, name: str) -> None:
    given = with_odd(backward(), odd, name)
    assert given is None or not reader().combine_backward(*given.values())


def with_odd(given: dict[str, Any], odd: str, name: str) -> dict[str, Any] | None:
    """Return operands of a combine-type op, one of which is odd; None if any other one would be right also."""
    any_length = dict.fromkeys(("y", "send_plan", "grad_out"), ("one row more",))
    any_length["recv_weights"] = ("one row more", "one column more")
    if odd in any_length.get(name, ()) or (name.endswith("plan") and odd in ("no memory", "part of no memory")):
        return None  # plans always have memory, and the engine checks that they are its own
    if name.endswith("plan") and odd == "dtype of another kind":
        odd = "another dtype"
    if name == "recv_plan" and odd == "one dimension less":
        odd = "scalar"
    return {**given, name: ODD[odd](given[name])}


def test_more_rows_than_weights() -> None:
    given = combined()
    assert reader().combine(given["y"], given["recv_weights"][:5], given["recv_plan"], given["send_plan"]) == (5, 5, T)
    assert reader().combine(given["y"], given["recv_weights"][:4], given["recv_plan"], given["send_plan"]) is None
    y, weights, plan = (given[name] for name in ("y", "recv_weights", "recv_plan"))
    assert reader().combine_backward(y, y, weights[:5], plan)
    assert not reader().combine_backward(y, y, weights[:4], plan)


def test_where_vectors_begin() -> None:
    given = dispatched()
    assert reader(vector_bytes=16).dispatch(*given.values()) == T
    given["x"] = torch.zeros(T * H + 1)[1:].view(T, H)
    assert reader().dispatch(*given.values()) == T
    assert reader(vector_bytes=16).dispatch(*given.values()) == -1


def test_tensors_of_another_device() -> None:
    assert reader(on_cuda=True).dispatch(*dispatched().values()) == -1
    assert reader(device_index=1).dispatch(*dispatched().values()) == -1
    assert reader(on_cuda=True).combine(*combined().values()) is None


def test_a_torch_that_offers_no_table() -> None:
    methods = {name: getattr(Tensor, name) for name in ("is_neg", "_is_zerotensor")}
    for table in ({}, {"__dlpack_c_exchange_api__": 7}):
        without = reader(tensor=SimpleNamespace(**methods, **table))
        assert without.dispatch(*dispatched().values()) == -1
        assert without.combine(*combined().values()) is None


def test_ops_do_the_same_where_nothing_is_plain() -> None:
    def there_and_back(buffer: Buffer) -> tuple[Tensor, Handle]:
        torch.manual_seed(0)
        x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
        recv_x, recv_weights, handle = buffer.dispatch(x, torch.tensor([[0, 1], [2, -1], [3, 3]]), weights)
        out = buffer.combine(recv_x, recv_weights, handle)
        return torch.cat([out.flatten(), *(g.flatten() for g in torch.autograd.grad(out.sum(), (x, weights)))]), handle

    sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float32)
    with Buffer(None, **sizes) as buffer:
        expected, handle = there_and_back(buffer)
        asked: list[str] = []
        refusing = {"dispatch": -1, "combine": None, "combine_backward": False}
        buffer._engine._reader = SimpleNamespace(
            **{name: lambda *args, name=name: asked.append(name) or refusing[name] for name in refusing}
        )
        found, other = there_and_back(buffer)
        assert asked == ["dispatch", "combine", "combine_backward", "combine"]
        assert torch.equal(found, expected)
        assert torch.equal(other.offs, handle.offs)


@pytest.mark.parametrize(("begin", "end"), [(-8, 0), (-8, 1), (-1, 1), (0, 8)])
def test_memory_that_is_avoided(begin: int, end: int) -> None:
    """A tensor with a byte in the avoided range is not plain; the range is relative to its end, then to its start."""
    for name in ("x", "topk_idx", "weights"):
        given = dispatched()
        looks = reader()
        first = given[name].data_ptr() + given[name].nbytes
        looks.avoid(begin=first + begin, end=first + end)
        assert (looks.dispatch(*given.values()) == T) is (begin >= 0), name
        looks.avoid(begin=given[name].data_ptr() + begin, end=given[name].data_ptr() + end)
        assert (looks.dispatch(*given.values()) == T) is (end <= 0), name
    for name in ("y", "recv_weights", "recv_plan", "send_plan"):
        returned = combined()
        looks = reader()
        assert looks.combine(*returned.values()) is not None
        looks.avoid(begin=returned[name].data_ptr(), end=returned[name].data_ptr() + 1)
        assert looks.combine(*returned.values()) is None, name
    for name in backward():
        given = backward()
        looks = reader()
        looks.avoid(begin=given[name].data_ptr(), end=given[name].data_ptr() + 1)
        assert not looks.combine_backward(*given.values()), name


@pytest.mark.parametrize("tag", [-1, 1 << 28, 0.0])
def test_plain_tensors_do_not_hide_a_wrong_tag(tag: Any) -> None:
    sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float32)
    with Buffer(None, **sizes) as buffer:
        x = torch.randn(T, H)
        recv_x, recv_weights, handle = buffer.dispatch(x, torch.zeros(T, K).long(), torch.rand(T, K))
        plans = handle.recv_plan, handle.send_plan
        calls = {
            "dispatch": (x, torch.zeros(T, K).long(), torch.rand(T, K)),
            "combine": (recv_x, recv_weights, *plans),
            "combine_backward": (x, recv_x, recv_weights, plans[0]),
            "dispatch_backward": (recv_x, recv_weights, *plans),
        }
        for name, given in calls.items():
            with pytest.raises(InvalidInput, match="tag: got"):
                getattr(buffer._engine, name)(*given, tag)
