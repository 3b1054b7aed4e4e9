"""Every refusal of an operand announces its op, its layer tag and two sizes, in words on record.

After a change on purpose: python tests/faults/test_recorded_refusals.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, write_record
from support.routing import buffer_kwargs, make_spec
from torch import Tensor

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidInput, MoeRtError, Op

RECORD = Path(__file__).with_name("refusals.json")
T, H, K, CAPACITY = 5, 20, 3, 36  # the capacity of a single rank is num_max_tokens_per_rank * K
SPECS: dict[str, dict[str, Any]] = {
    "experts": {},
    "tokens": {"layout": "tokens"},
    "coded": {"dispatch_dtype": torch.int8},
    "deep": {"depth": 2},
    "fp64": {"dtype": torch.float64},
}
Call = Callable[[Buffer, dict[str, Any]], Any]


def f(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def engine_call(method: str, *names: str, **changes: Any) -> Call:
    """Return a call of an engine's method with the named operands, some of them changed."""
    order = dict.fromkeys((*names, *changes))

    def call(buffer: Buffer, good: dict[str, Any]) -> Any:
        arguments = [changes[name] if name in changes else good[name] for name in order]
        return getattr(buffer._engine, method)(*arguments)

    return call


def dispatch(**changes: Any) -> Call:
    return engine_call("dispatch", "x", "topk_idx", "topk_weights", "tag", "max_tokens", **changes)


def dispatch_scaled(**changes: Any) -> Call:
    return engine_call("dispatch_scaled", "codes", "scales", "topk_idx", "topk_weights", "tag", "max_tokens", **changes)


def combine(**changes: Any) -> Call:
    return engine_call("combine", "y", "recv_weights", "recv_plan", "send_plan", "tag", "out", **changes)


def dispatch_backward(**changes: Any) -> Call:
    names = "grad_recv_x", "grad_recv_weights", "recv_plan", "send_plan", "tag"
    return engine_call("dispatch_backward", *names, **changes)


def combine_backward(**changes: Any) -> Call:
    return engine_call("combine_backward", "grad_out", "y", "recv_weights", "recv_plan", "tag", **changes)


def tokens_backward(**changes: Any) -> Call:
    return engine_call("combine_tokens_backward", "grad_out", "recv_plan", "num_rows", "tag", **changes)


def tags(call: Callable[..., Call]) -> dict[str, Call]:
    return {f"tag {tag!r}": call(tag=tag) for tag in (-1, 1 << 28, True, 2.0, None)}


def in_window(name: str, call: Callable[..., Call]) -> Call:
    def refused(buffer: Buffer, good: dict[str, Any]) -> Any:
        window = buffer.token_window(T)
        return call(**{name: window})(buffer, good)

    return refused


def later_window(buffer: Buffer, good: dict[str, Any]) -> Any:
    window = buffer.token_window(T)
    buffer._engine.dispatch(good["x"], good["topk_idx"], good["topk_weights"], 0)
    buffer._engine.dispatch(window, good["topk_idx"], good["topk_weights"], 4)


def part_of_window(buffer: Buffer, good: dict[str, Any]) -> Any:
    window = buffer.token_window(T + 1)[1:]
    buffer._engine.dispatch(window, good["topk_idx"], good["topk_weights"], 4)


def codes_in_window(buffer: Buffer, good: dict[str, Any]) -> Any:
    codes = buffer.token_window(T).view(torch.uint8)[:, :H]
    buffer._engine.dispatch_scaled(codes, f(T, 1), good["topk_idx"], good["topk_weights"], 4, None)


def too_many_under_way(method: str, count: int, *, scaled: bool = False) -> Call:
    def refused(buffer: Buffer, good: dict[str, Any]) -> Any:
        given = good["x"], good["topk_idx"], good["topk_weights"]
        begun = [buffer.dispatch(*given, tag=9 + n, wait=False) for n in range(count)]
        try:
            if method == "combine":
                buffer._engine.combine(good["y"], good["recv_weights"], good["recv_plan"], good["send_plan"], 4)
            elif method == "begin":
                buffer.dispatch(*given, tag=4, wait=False)
            else:
                buffer.token_window(T)
        finally:
            for each in begun:
                each.wait()

    return refused


def required(op: Op, tag: Any = 4, max_tokens: Any = None, **tensors: Any) -> Call:
    return lambda buffer, good: buffer._engine.require_call(op, tag, max_tokens, **tensors)


def of_buffer(**changes: Any) -> Call:
    """A dispatch through the buffer, whose checks come before those of torch's dispatcher."""

    def refused(buffer: Buffer, good: dict[str, Any]) -> Any:
        given = {name: changes.get(name, good[name]) for name in ("x", "topk_idx", "topk_weights")}
        more = {name: value for name, value in changes.items() if name not in given}
        return buffer.dispatch(*given.values(), **{"tag": 4, **more})

    return refused


def combine_of_buffer(**changes: Any) -> Call:
    def refused(buffer: Buffer, good: dict[str, Any]) -> Any:
        *_, handle = buffer.dispatch(good["x"], good["topk_idx"], good["topk_weights"], tag=4)
        given = {"y": good["y"], "recv_weights": good["recv_weights"], "handle": handle, **changes}
        return buffer.combine(**given)

    return refused


def out_over(name: str) -> Call:
    """A combine whose `out` is memory of a plan."""

    def refused(buffer: Buffer, good: dict[str, Any]) -> Any:
        plan = torch.zeros(max(good[name].numel(), T * H), dtype=torch.int32)
        own = {**good, name: plan[: good[name].numel()].view(good[name].shape)}
        own["out"] = plan[: T * H].view(torch.float32).view(T, H)
        return combine()(buffer, own)

    return refused


CALLS: dict[str, dict[str, Call]] = {
    "dispatch": {
        **tags(dispatch),
        **{f"max_tokens {most!r}": dispatch(max_tokens=most) for most in (0, 13, True, 4.0)},
        "six tokens of at most four": dispatch(x=f(6, H), topk_idx=ids(6, K), topk_weights=f(6, K), max_tokens=4),
        "thirteen tokens": dispatch(x=f(13, H), topk_idx=ids(13, K), topk_weights=f(13, K)),
        "x of another size": dispatch(x=f(T, H + 1)),
        "x of another dtype": dispatch(x=f(T, H, dtype=torch.float64)),
        "x a scalar": dispatch(x=torch.tensor(1.0)),
        "x on meta": dispatch(x=torch.zeros(T, H, device="meta")),
        "x sparse": dispatch(x=f(T, H).to_sparse()),
        "x nested": dispatch(x=torch.nested.nested_tensor([f(2, H), f(3, H)])),
        "ids of another dtype": dispatch(topk_idx=ids(T, K, dtype=torch.int16)),
        "ids of another size": dispatch(topk_idx=ids(T, K - 1)),
        "small ids of another count": dispatch(topk_idx=ids(T + 1, K, dtype=torch.int32)),
        "weights of another dtype": dispatch(topk_weights=f(T, K, dtype=torch.float64)),
        "weights of another size": dispatch(topk_weights=f(T, K + 2)),
        "ids in a window": in_window("topk_idx", dispatch),
        "a window of an earlier op": later_window,
        "a part of a window": part_of_window,
    },
    "dispatch of codes": {
        **{f"tag {tag!r}": dispatch_scaled(tag=tag) for tag in (-1, 1 << 28)},
        "max_tokens 13": dispatch_scaled(max_tokens=13),
        "codes of another size": dispatch_scaled(codes=f(T, H + 1, dtype=torch.int8)),
        "codes of another dtype": dispatch_scaled(codes=f(T, H)),
        "packed codes of another size": dispatch_scaled(codes=f(T, H // 2 + 1, dtype=torch.uint8)),
        "packed codes of another dtype": dispatch_scaled(codes=f(T, H // 2, dtype=torch.int8)),
        "codes one-dimensional": dispatch_scaled(codes=f(T, dtype=torch.int8)),
        "scales of another dtype": dispatch_scaled(scales=f(T, 1, dtype=torch.float64)),
        "scales of another count": dispatch_scaled(scales=f(T + 1, 1)),
        "scales without columns": dispatch_scaled(scales=f(T, 0)),
        "scales one-dimensional": dispatch_scaled(scales=f(T)),
        "scales that do not fit": dispatch_scaled(scales=f(T, 25)),
        "thirteen tokens": dispatch_scaled(
            codes=f(13, H, dtype=torch.int8), scales=f(13, 1), topk_idx=ids(13, K), topk_weights=f(13, K)
        ),
        "no codec and no scales": dispatch_scaled(codes=f(T, H), scales=None),
        "codes in a window": codes_in_window,
    },
    "combine": {
        **tags(combine),
        "y of another size": combine(y=f(7, H - 1)),
        "y of another dtype": combine(y=f(7, H, dtype=torch.bfloat16)),
        "y a scalar": combine(y=torch.tensor(0.0)),
        "more rows than weights": combine(y=f(CAPACITY + 1, H)),
        "weights of another dtype": combine(recv_weights=f(CAPACITY, dtype=torch.float64)),
        "weights of two dimensions": combine(recv_weights=f(CAPACITY, 1)),
        "no weights": combine(recv_weights=None),
        "no weights, and another plan": combine(recv_weights=None, recv_plan=ids(3, dtype=torch.int32)),
        "another recv_plan": combine(recv_plan=ids(3, dtype=torch.int32)),
        "recv_plan of another dtype": combine(recv_plan=ids(3)),
        "another send_plan": combine(send_plan=ids(T, K + 1, dtype=torch.int32)),
        "send_plan of another dtype": combine(send_plan=ids(T, K)),
        "out of another size": combine(out=f(T, H + 1)),
        "out of another count": combine(out=f(T + 1, H)),
        "out of another dtype": combine(out=f(T, H, dtype=torch.float16)),
        "out with strides": combine(out=f(H, T).t()),
        "out negated": combine(out=f(T, H)._neg_view()),
        "out without memory": combine(out=torch._efficientzerotensor((T, H))),
        "out over recv_plan": out_over("recv_plan"),
        "out over send_plan": out_over("send_plan"),
        "y in a window": in_window("y", combine),
        "out in a window": in_window("out", combine),
        "out with gradients": lambda buffer, good: buffer._engine.require_no_grad(4, f(2).requires_grad_()),
    },
    "backward of dispatch": {
        **tags(dispatch_backward),
        "rows of another size": dispatch_backward(grad_recv_x=f(7, H + 3)),
        "more rows than weights": dispatch_backward(grad_recv_x=f(CAPACITY + 2, H)),
        "weights of another dtype": dispatch_backward(grad_recv_weights=f(CAPACITY, dtype=torch.float16)),
        "another recv_plan": dispatch_backward(recv_plan=ids(3, dtype=torch.int32)),
        "another send_plan": dispatch_backward(send_plan=ids(T, K + 1, dtype=torch.int32)),
    },
    "backward of combine": {
        **tags(combine_backward),
        "gradient of another size": combine_backward(grad_out=f(T, H - 2)),
        "gradient one-dimensional": combine_backward(grad_out=f(T)),
        "y of another size": combine_backward(y=f(7, H + 1)),
        "more rows than weights": combine_backward(y=f(CAPACITY + 3, H)),
        "weights of another dtype": combine_backward(recv_weights=f(CAPACITY, dtype=torch.float64)),
        "another recv_plan": combine_backward(recv_plan=ids(3, dtype=torch.int32)),
        "rows of experts as rows of tokens": tokens_backward(),
        "rows of experts as rows of tokens, and no gradient": tokens_backward(grad_out=f(T)),
    },
    "before torch's dispatcher": {
        "tag -1": required(Op.COMBINE_BACKWARD, -1),
        "tag too large": required(Op.COMBINE, 1 << 28),
        "tag of another type": required(Op.DISPATCH_BACKWARD, "1"),
        "max_tokens of another type": required(Op.DISPATCH, 5, "6"),
        "no tensor": required(Op.COMBINE, 5, y=[1.0]),
        "a tensor on another device": required(Op.COMBINE, 5, y=torch.zeros(1, device="meta")),
        "a sparse tensor": required(Op.DISPATCH, 5, x=f(T, H).to_sparse()),
        "the second of two": required(Op.DISPATCH, 5, x=f(T, H), topk_idx=None),
        "coded of another type": of_buffer(coded=1),
        "a tuple of three": of_buffer(x=(f(T, H),) * 3),
        "a tuple without scales": of_buffer(x=(f(T, H), None)),
        "no handle": combine_of_buffer(handle=(1, 2)),
        "out and no wait": combine_of_buffer(out=f(T, H), wait=False),
        "a window with gradients": lambda buffer, good: buffer._engine.require_begin(
            4, buffer.token_window(T), good["topk_idx"], good["topk_weights"].clone().requires_grad_()
        ),
        "codes with gradients": lambda buffer, good: buffer._engine.require_no_grad_through_codes(
            4, good["x"], good["topk_weights"].clone().requires_grad_()
        ),
        "rows that are no window": lambda buffer, good: (
            buffer.token_window(T),
            buffer._engine.require_window_as_handed_out(4, good["x"]),
        ),
    },
    "one under way": {method: too_many_under_way(method, 1) for method in ("combine", "begin", "token_window")},
}
TOKENS: dict[str, dict[str, Call]] = {
    "rows of tokens": {
        "weights of rows": combine(),
        "weights of rows, and another plan": combine(recv_plan=ids(3, dtype=torch.int32)),
        "y of another size": combine(recv_weights=None, y=f(7, H + 1)),
        "backward with weights": combine_backward(),
        "backward with weights, and no gradient": combine_backward(grad_out=f(T)),
        "weights of rows of experts": dispatch_backward(grad_recv_weights=f(CAPACITY)),
        "tag -1": tokens_backward(tag=-1),
        "gradient of another size": tokens_backward(grad_out=f(T, H - 2)),
        "another recv_plan": tokens_backward(recv_plan=ids(3, dtype=torch.int32)),
    }
}
DEEP: dict[str, dict[str, Call]] = {
    "two under way": {method: too_many_under_way(method, 2) for method in ("combine", "begin", "token_window")}
}
CODED: dict[str, dict[str, Call]] = {
    "a codec": {
        "rows of another size": dispatch_scaled(codes=f(T, H + 1), scales=None),
        "six tokens of at most four": dispatch_scaled(
            codes=f(6, H), scales=None, topk_idx=ids(6, K), topk_weights=f(6, K), max_tokens=4
        ),
    }
}
FP64: dict[str, dict[str, Call]] = {
    "fp64": {
        "weights of fp32": dispatch(x=f(T, H, dtype=torch.float64)),
        "rows of fp32": dispatch(topk_weights=f(T, K, dtype=torch.float64)),
    }
}
GROUPS = {"experts": CALLS, "tokens": TOKENS, "deep": DEEP, "coded": CODED, "fp64": FP64}


def good_operands(buffer: Buffer) -> dict[str, Any]:
    engine, plan = buffer._engine, torch.zeros(buffer._engine.plan_ints, dtype=torch.int32)
    return {
        "x": f(T, H), "topk_idx": ids(T, K), "topk_weights": f(T, K), "tag": 4, "max_tokens": None,
        "codes": f(T, H, dtype=torch.int8), "scales": f(T, 1), "y": f(7, H), "out": None, "num_rows": 7,
        "recv_weights": f(*engine.weights_shape(CAPACITY)), "grad_recv_weights": f(*engine.weights_shape(CAPACITY)),
        "recv_plan": plan, "send_plan": ids(T, K, dtype=torch.int32), "grad_recv_x": f(7, H), "grad_out": f(T, H),
    }  # fmt: skip


def refusals(spec: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each call, and what it announces and raises."""
    with Buffer(ThreadGroup.make(1)[0], **buffer_kwargs(make_spec(1, **SPECS[spec]))) as buffer:
        announced: list[Any] = []

        def refuse(op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> None:
            announced[:] = [Op(op).name, tag, got, expected]
            raise error

        buffer._engine._refuse = refuse  # type: ignore[method-assign,assignment]
        for group, calls in GROUPS[spec].items():
            for name, call in calls.items():
                announced[:] = []
                with pytest.raises(InvalidInput) as raised:
                    call(buffer, good_operands(buffer))
                error = raised.value
                where = [type(error).__name__, error.rank, error.op.name]
                yield f"{group}: {name}", [*announced, *where, error.args[0]]


@pytest.mark.parametrize("spec", SPECS)
def test_refusals_are_those_on_record(spec: str) -> None:
    assert_on_record(RECORD, spec, dict(refusals(spec)))


if __name__ == "__main__":
    write_record(RECORD, {spec: dict(refusals(spec)) for spec in SPECS})
