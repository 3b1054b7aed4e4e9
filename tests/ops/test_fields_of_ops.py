"""The structs that ops give to C++: every field, of plain tensors and of views; outputs, and what halves keep alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.routing import buffer_kwargs, make_spec
from torch import Tensor

from moe_rt import Buffer, ThreadGroup, _engine
from moe_rt.engine import engine as engine_module
from moe_rt.engine.engine import Engine, engine_by_id
from moe_rt.errors import CapacityOverflow, GroupClosed, Op

T, H, K, N, CAPACITY, MOST = 5, 20, 3, 7, 36, 12
ANY = _engine.ANY_CAPACITY


class Fields:
    """A struct of C++ as it was filled."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Calls:
    """Ops of one rank that are noted instead of run, and tensors by which their fields are named."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Any = engine
        self.ran: list[tuple[Op, Fields, int]] = []
        self.engine._run = lambda op, args, tag: self.ran.append((op, args, tag))

    def fields(self, **tensors: Any) -> dict[str, Any]:
        """Return the fields of the last op; an address becomes the name of its tensor."""
        (_, args, _), names = self.ran[-1], {t.data_ptr(): name for name, t in tensors.items() if t is not None}
        return {name: names.get(value, value) if value else value for name, value in vars(args).items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Calls]]:
    """Return calls(**changes), which opens a buffer of one rank with these changes of its spec."""
    opened: list[Buffer] = []
    for name in ("DispatchArgs", "CombineArgs", "CombineBackwardArgs", "ScaledArgs"):
        monkeypatch.setattr(engine_module._engine, name, Fields)

    def opening(**changes: Any) -> Calls:
        opened.append(Buffer(ThreadGroup.make(1)[0], **buffer_kwargs(make_spec(1, **changes))))
        return Calls(opened[-1]._engine)

    yield opening
    for buffer in opened:
        buffer.close()


def plain(t: Tensor) -> Tensor:
    return t


def strided(t: Tensor) -> Tensor:
    """Return a view with gaps."""
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    return wide[..., ::2].copy_(t)


def shapes(*outputs: Tensor) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(t.dtype, tuple(t.shape)) for t in outputs]


def routing(ids: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(T, H), torch.zeros(T, K, dtype=ids), torch.ones(T, K)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize(("max_tokens", "most", "capacity"), [(None, 12, 36), (12, 12, 36), (5, 5, 15)])
def test_a_dispatch(calls: Any, ids: torch.dtype, max_tokens: int | None, most: int, capacity: int) -> None:
    at = calls()
    x, topk_idx, weights = routing(ids)
    recv_x, recv_weights, offs, recv_plan, send_plan = at.engine.dispatch(x, topk_idx, weights, 9, max_tokens)
    names = dict(x=x, topk_idx=topk_idx, topk_weights=weights, recv_x=recv_x, recv_weights=recv_weights, offs=offs,
                 recv_plan=recv_plan, send_plan=send_plan)  # fmt: skip
    assert at.fields(**names) == {
        **{name: name for name in names},
        "idx_bytes": ids.itemsize,
        "num_tokens": T,
        "max_tokens": most,
        "capacity": capacity,
    }
    assert at.ran[0][::2] == (Op.DISPATCH, 9)
    int32 = torch.int32
    assert shapes(recv_x, recv_weights, offs, recv_plan, send_plan) == [
        (torch.float32, (capacity, H)),
        (torch.float32, (capacity,)),
        (int32, (9,)),
        (int32, (at.engine.plan_ints,)),
        (int32, (T, K)),
    ]


def test_a_dispatch_of_views_is_one_of_their_copies(calls: Any) -> None:
    at = calls()
    given = [strided(t) for t in routing()]
    at.engine.dispatch(*given, 0)
    fields = at.fields()
    assert {fields[name] for name in ("x", "topk_idx", "topk_weights")}.isdisjoint(t.data_ptr() for t in given)
    assert fields["num_tokens"] == T


@pytest.mark.parametrize("num_tokens", [0, 12])
def test_the_fewest_and_the_most_tokens(calls: Any, num_tokens: int) -> None:
    at = calls()
    out = at.engine.dispatch(torch.ones(num_tokens, H), torch.zeros(num_tokens, K, dtype=torch.int64),
                             torch.ones(num_tokens, K), 0)  # fmt: skip
    assert at.fields()["num_tokens"] == len(out[-1]) == num_tokens


@pytest.mark.parametrize("tag", [0, (1 << 28) - 1])
def test_the_first_and_the_last_tag(calls: Any, tag: int) -> None:
    at, given = calls(), operands()
    at.engine.dispatch(*routing(), tag)
    at.engine.combine(*given, tag)
    at.engine.dispatch_backward(torch.ones(N, H), given[1], *given[2:], tag)
    at.engine.combine_backward(torch.ones(T, H), *given[:3], tag)
    assert [ran[2] for ran in at.ran] == [tag] * 4


def test_rows_at_fixed_places_of_each_expert(calls: Any) -> None:
    at = calls()
    recv_x, recv_weights, *_ = at.engine.dispatch(*routing(), 0, 12, expert_rows=12)
    fields = at.fields()
    assert (fields["expert_rows"], fields["capacity"], len(recv_x), len(recv_weights)) == (12, 108, 108, 108)


def test_rows_of_tokens(calls: Any) -> None:
    at = calls(layout="tokens")
    recv_x, recv_weights, offs, *_ = at.engine.dispatch(*routing(), 0)
    assert shapes(recv_x, recv_weights, offs)[1:] == [(torch.float32, (12, K)), (torch.int32, (1,))]


def test_codes_and_scales(calls: Any) -> None:
    at = calls()
    _, topk_idx, weights = routing()
    codes, scales = torch.zeros(T, H, dtype=torch.int8), torch.zeros(T, 2, dtype=torch.uint8)
    *outputs, recv_scales = at.engine.dispatch_scaled(codes, scales, topk_idx, weights, 0, None)
    scaled = at.ran[-1][1].scaled
    assert vars(scaled) == {
        "row_format": engine_module.RowFormat.of(codes, scales).word(H),
        "scales": scales.data_ptr(),
        "recv_scales": recv_scales.data_ptr(),
        "code_bytes": H,
        "scale_bytes": 2,
    }
    assert at.fields(x=codes)["x"] == "x"
    assert shapes(outputs[0], recv_scales) == [(torch.int8, (CAPACITY, H)), (torch.uint8, (CAPACITY, 2))]


def test_codes_of_the_buffers_own(calls: Any) -> None:
    at = calls(dispatch_dtype=torch.float8_e4m3fn)
    x, topk_idx, weights = routing()
    *outputs, recv_scales = at.engine.dispatch_scaled(x, None, topk_idx, weights, 0, None)
    scaled = vars(at.ran[-1][1].scaled)
    assert (scaled["row_format"], scaled["scales"]) == (0, 0), "peers get rows of the buffer's codec"
    assert (scaled["code_bytes"], scaled["scale_bytes"]) == (H, 4)
    assert shapes(outputs[0], recv_scales) == [
        (torch.float8_e4m3fn, (CAPACITY, H)),
        (torch.float32, (CAPACITY, 1)),
    ]


def operands(plan_ints: int = 132) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, recv_weights, recv_plan and send_plan."""
    plan = torch.zeros(plan_ints, dtype=torch.int32)
    return torch.ones(N, H), torch.ones(CAPACITY), plan, torch.zeros(T, K, dtype=torch.int32)


NO_GRADIENTS = {"grad_recv_weights": 0, "grad_topk_weights": 0}


@pytest.mark.parametrize("kind", [plain, strided])
@pytest.mark.parametrize("into", [False, True])
def test_a_combine(calls: Any, kind: Callable[[Tensor], Tensor], into: bool) -> None:
    at = calls()
    y, weights, recv_plan, send_plan = (kind(t) for t in operands())
    out = torch.empty(T, H) if into else None
    version = out._version if out is not None else 0
    made = at.engine.combine(y, weights, recv_plan, send_plan, 9, out)
    found = at.fields(y=y, recv_weights=weights, recv_plan=recv_plan, send_plan=send_plan, out=made)
    names = ("y", "recv_weights", "recv_plan", "send_plan")
    if kind is strided:
        assert not {found.pop(name) for name in names} & set(names), "C++ reads copies"
    expected = {"op": int(Op.COMBINE), "num_rows": N, "capacity": CAPACITY, "num_tokens": T, "out": "out"}
    assert found == {**expected, **NO_GRADIENTS, **({name: name for name in names} if kind is plain else {})}
    assert at.ran[0][::2] == (Op.COMBINE, 9)
    assert shapes(made) == [(torch.float32, (T, H))]
    if out is not None:
        assert made is out
        assert out._version == version + 1, "autograd must know of the change"


def test_out_of_an_inference_counts_no_change(calls: Any) -> None:
    at = calls()
    with torch.inference_mode():
        out = torch.empty(T, H)
        assert at.engine.combine(*operands(), 0, out) is out


def test_out_that_cannot_be_written_in_place_is_a_copy(calls: Any) -> None:
    at, fresh = calls(), torch.full((T, H), 7.0)
    at.engine._writable = lambda out: fresh
    out = torch.zeros(T, H)
    assert at.engine.combine(*operands(), 0, out) is out
    assert at.fields(fresh=fresh)["out"] == "fresh"
    assert torch.equal(out, fresh)


def test_a_combine_of_rows_of_tokens(calls: Any) -> None:
    at = calls(layout="tokens")
    y, _, recv_plan, send_plan = operands(at.engine.plan_ints)
    at.engine.combine(y, None, recv_plan, send_plan, 0)
    fields = at.fields()
    assert (fields["recv_weights"], fields["capacity"], fields["num_rows"]) == (0, ANY, N)


@pytest.mark.parametrize("kind", [plain, strided])
def test_weights_that_stay_at_their_source(calls: Any, kind: Callable[[Tensor], Tensor]) -> None:
    at = calls(sums="invariant")
    _, _, recv_plan, send_plan = operands(at.engine.plan_ints)
    y, weights = torch.ones(9, 4, H), torch.ones(T, K)
    given = kind(weights)
    at.engine.combine(y, None, recv_plan, send_plan, 0, topk_weights=given)
    fields = at.fields(y=y, topk_weights=given)
    assert (fields["y"], fields["num_rows"], fields["capacity"], fields["recv_weights"]) == ("y", 36, ANY, 0)
    assert (fields["topk_weights"] == "topk_weights") is (kind is plain)


@pytest.mark.parametrize("kind", [plain, strided])
def test_a_backward_of_dispatch(calls: Any, kind: Callable[[Tensor], Tensor]) -> None:
    at = calls()
    rows, weights, recv_plan, send_plan = (kind(t) for t in operands())
    grad_x, grad_weights = at.engine.dispatch_backward(rows, weights, recv_plan, send_plan, 9)
    names = dict(y=rows, grad_recv_weights=weights, recv_plan=recv_plan, send_plan=send_plan)
    found = at.fields(**names, out=grad_x, grad_topk_weights=grad_weights)
    if kind is strided:
        assert not {found.pop(name) for name in names} & set(names)
    assert found == {
        **({name: name for name in names} if kind is plain else {}),
        "op": int(Op.DISPATCH_BACKWARD),
        "recv_weights": 0,
        "num_rows": N,
        "capacity": CAPACITY,
        "num_tokens": T,
        "out": "out",
        "grad_topk_weights": "grad_topk_weights",
    }
    assert at.ran[0][::2] == (Op.DISPATCH_BACKWARD, 9)
    assert shapes(grad_x, grad_weights) == [(torch.float32, (T, H)), (torch.float32, (T, K))]


@pytest.mark.parametrize("kind", [plain, strided])
def test_a_backward_of_combine(calls: Any, kind: Callable[[Tensor], Tensor]) -> None:
    at = calls()
    y, weights, recv_plan, _ = (kind(t) for t in operands())
    grad_out = kind(torch.ones(T, H))
    grad_y, grad_weights = at.engine.combine_backward(grad_out, y, weights, recv_plan, 9)
    names = dict(grad_out=grad_out, y=y, recv_weights=weights, recv_plan=recv_plan)
    found = at.fields(**names, grad_y=grad_y, grad_recv_weights=grad_weights)
    if kind is strided:
        assert not {found.pop(name) for name in names} & set(names)
    assert found == {
        **({name: name for name in names} if kind is plain else {}),
        "num_tokens": T,
        "num_rows": N,
        "capacity": CAPACITY,
        "grad_y": "grad_y",
        "grad_recv_weights": "grad_recv_weights",
    }
    assert at.ran[0][::2] == (Op.COMBINE_BACKWARD, 9)
    assert shapes(grad_y, grad_weights) == [(torch.float32, (N, H)), (torch.float32, (CAPACITY,))]


def test_a_backward_of_combine_of_rows_of_tokens(calls: Any) -> None:
    at = calls(layout="tokens")
    grad_out, recv_plan = torch.ones(T, H), operands(at.engine.plan_ints)[2]
    grad_y = at.engine.combine_tokens_backward(grad_out, recv_plan, N, 9)
    assert at.fields(grad_out=grad_out, recv_plan=recv_plan, grad_y=grad_y) == {
        "grad_out": "grad_out",
        "num_tokens": T,
        "y": 0,
        "recv_weights": 0,
        "num_rows": N,
        "capacity": ANY,
        "recv_plan": "recv_plan",
        "grad_y": "grad_y",
        "grad_recv_weights": 0,
    }
    assert shapes(grad_y) == [(torch.float32, (N, H))]


def started(at: Calls) -> tuple[list[Any], Callable[..., None]]:
    """Return the tensors that ops in halves keep alive, and the `start` that notes them."""
    kept: list[Any] = []
    return kept, lambda args, tag, *used: kept.append((tag, *used))


def test_halves_keep_all_tensors_whose_addresses_they_have(calls: Any) -> None:
    at = calls()
    kept, start = started(at)
    x, ids, weights = routing()
    y, recv_weights, recv_plan, send_plan = operands()
    codes, scales, grad = torch.zeros(T, H, dtype=torch.int8), torch.zeros(T, 1), torch.ones(T, H)
    at.engine.dispatch(x, ids, weights, 1, start=start)
    at.engine.dispatch_scaled(codes, scales, ids, weights, 2, None, start=start)
    at.engine.combine(y, recv_weights, recv_plan, send_plan, 3, start=start)
    at.engine.dispatch_backward(y, recv_weights, recv_plan, send_plan, 4, start=start)
    at.engine.combine_backward(grad, y, recv_weights, recv_plan, 5, start=start)
    expected = [
        (1, x, ids, weights),
        (2, codes, ids, weights, scales),
        (3, y, recv_weights, recv_plan, send_plan, None),
        (4, y, recv_weights, recv_plan, send_plan),
        (5, grad, y, recv_weights, recv_plan),
    ]
    for (tag, *used), (number, *tensors) in zip(kept, expected, strict=True):
        assert tag == number
        assert [id(t) for t in used] == [id(t) for t in tensors], tag
    assert at.ran == [], "they are started, not run"
    tokens = calls(layout="tokens")
    plan = operands(tokens.engine.plan_ints)[2]
    kept, start = started(tokens)
    tokens.engine.combine_tokens_backward(grad, plan, N, 6, start=start)
    assert [id(t) for t in kept[0][1:]] == [id(grad), id(None), id(None), id(plan)]


@pytest.mark.parametrize("on", [True, False])
def test_outputs_are_zero_only_where_torch_looks_at_all_of_them(
    calls: Any, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    """Anomaly mode looks at rows that no op writes."""
    at = calls()
    at.engine._memory.empty_like = at.engine._rows = lambda rows, like: torch.full((rows, H), torch.nan)
    with torch.autograd.set_detect_anomaly(on, check_nan=False):
        recv_x, recv_weights, *_ = at.engine.dispatch(*routing(), 0)
        y, weights, recv_plan, _ = operands()
        grad_y, grad_weights = at.engine.combine_backward(torch.ones(T, H), y, weights, recv_plan, 0)
    assert bool(recv_x.isnan().any()) is not on
    assert bool(grad_y.isnan().any()) is not on
    if on:
        assert not recv_weights.any()
        assert not grad_weights.any()


@pytest.mark.parametrize("grows", [True, False])
def test_a_dispatch_that_overflows_is_repeated_once_if_capacity_grows(calls: Any, grows: bool) -> None:
    at = calls()
    asked: list[Any] = []
    x, ids, weights = routing()

    def run(op: Op, args: Any, tag: int) -> None:
        at.ran.append((op, args, tag))
        raise CapacityOverflow("too many rows")

    at.engine._run = run
    at.engine._grow = lambda most: asked.append(most) or grows
    at.engine._advise = lambda error, topk_idx: asked.append(topk_idx)
    with pytest.raises(CapacityOverflow):
        at.engine.dispatch(x, ids, weights, 3, 6)
    assert len(at.ran) == (2 if grows else 1)
    assert asked[0] == 6
    assert [id(t) for t in asked[1:]] == ([] if grows else [id(ids)])
    assert [(ran[1].max_tokens, ran[2]) for ran in at.ran] == [(6, 3)] * len(at.ran)


def test_capacity_is_that_of_a_buffer_for_as_many_tokens(calls: Any) -> None:
    engine = calls(capacity_factor=1.5).engine
    assert engine.capacity_for(None) == engine.capacity == engine.capacity_for(12) == engine.spec.capacity(0)
    for most in (1, 5, 11):
        assert engine.capacity_for(most) == engine.spec.capacity(0, most)
    engine._capacities[5] = 99  # as after a retry
    assert engine.capacity_for(5) == 99


def test_names_of_engines_say_what_graphs_depend_on(calls: Any) -> None:
    """Graphs are cached by their text, which has an engine's id: half is new for each, half follows from its shapes."""
    first, second, other = calls().engine, calls().engine, calls(num_max_tokens_per_rank=13).engine
    low = (1 << 32) - 1
    assert first.id & low == second.id & low != other.id & low
    assert (second.id >> 32) - (first.id >> 32) == 1
    assert 0 < first.id < 1 << 63
    assert engine_by_id(first.id) is first
    with pytest.raises(GroupClosed) as raised:
        engine_by_id(7)
    assert raised.value.args[0] == "buffer 7: got an op on a buffer that no longer exists, expected an open one"


def test_plain_tensors_are_read_by_c_without_checks_in_python(calls: Any) -> None:
    """It reads them at any address, as CPU ranks need no alignment; anything else is left to Python."""
    reader = calls().engine._reader
    x, ids, weights = routing()
    y, recv_weights, recv_plan, send_plan = operands()
    odd = torch.ones(T * H + 1)[1:].view(T, H)
    for rows in (x, odd):
        assert reader.dispatch(rows, ids, weights) == T
    assert reader.dispatch(x, ids.int(), weights) == T
    assert reader.combine(y, recv_weights, recv_plan, send_plan) == (N, CAPACITY, T)
    assert reader.combine_backward(x, y, recv_weights, recv_plan)
    assert reader.dispatch(strided(x), ids, weights) == -1
    assert reader.dispatch(x.double(), ids, weights) == -1
    assert reader.dispatch(x.to("meta"), ids, weights) == -1
    assert reader.combine(strided(y), recv_weights, recv_plan, send_plan) is None
    assert not reader.combine_backward(strided(x), y, recv_weights, recv_plan)
