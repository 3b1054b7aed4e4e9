"""A round of the conformance tests names each output that a buffer gets wrong, and gives buffers NaN past real rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import rounds as kept_rounds
from support.rounds import expected_once
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.config.codec import RowFormat
from moe_rt.lab.testing import rounds
from moe_rt.lab.testing.rounds import WrongOutput, expect, play, play_scaled

CPU = torch.device("cpu")
NUM_TOKENS = 7
Spoil = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, dict[str, Any]] = {
    "experts": {},
    "aligned": {"expert_alignment": 8},
    "tokens": {"layout": "tokens"},
    "dropping": {"capacity_factor": 0.5, "overflow": "drop"},
}


def more(t: Tensor) -> Tensor:
    """Return a copy whose first element is another."""
    changed = t.detach().clone()
    changed.view(-1)[0] += 1
    return changed


class Changed(torch.autograd.Function):
    """Changes values, or gradients."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, values: Spoil | None, gradients: Spoil | None) -> Tensor:
        ctx.gradients = gradients
        return given.clone() if values is None else values(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] if ctx.gradients is None else ctx.gradients(grads[0])), None, None


class Handled:
    """A handle one of whose parts is another."""

    def __init__(self, real: Any, **other: Any) -> None:
        self.real = real
        self.__dict__ |= other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Spoilt:
    """A buffer that gets `wrong` wrong, and notes what it is given."""

    def __init__(self, real: Buffer, wrong: str = "nothing") -> None:
        self.real, self.wrong, self.num_combines = real, wrong, 0
        self.given: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def changed(self, t: Tensor, values: str, gradients: str, note: str = "") -> Tensor:
        def noted(grad: Tensor) -> Tensor:
            self.given[note or gradients] = grad.clone()
            return more(grad) if self.wrong == gradients else grad

        return Changed.apply(t, more if self.wrong == values else None, noted)

    def dispatch(self, x: Any, idx: Tensor, weights: Tensor, **options: Any) -> Any:
        self.given |= {"x": x, "topk_idx": idx, "topk_weights": weights, **options}
        if isinstance(x, tuple) or options.get("coded"):
            (codes, scales), recv_weights, handle = self.real.dispatch(x, idx, weights, **options)
            codes, scales = self.longer(codes, "long codes"), self.longer(scales, "long scales")
            codes = self.bits(codes, "codes")
            return (codes, self.bits(scales, "scales")), self.bits(recv_weights, "recv_weights"), self.of(handle)
        x = self.changed(x, "", "grad_x")
        weights = self.changed(weights, "", "grad_topk_weights")
        recv_x, recv_weights, handle = self.real.dispatch(x, idx, weights, **options)
        recv_x = self.changed(recv_x, "recv_x", "", "grad of recv_x")
        recv_weights = self.changed(recv_weights, "recv_weights", "", "grad of recv_weights")
        recv_x, recv_weights = self.longer(recv_x, "long recv_x"), self.longer(recv_weights, "long recv_weights")
        return recv_x, recv_weights, self.of(handle)

    def of(self, handle: Any) -> Any:
        parts = {
            "offs": lambda: more(handle.offs),
            "num_dropped": lambda: more(handle.num_dropped),
            "ends": lambda: more(handle.ends),
            "row_experts": lambda: lambda n: more(handle.row_experts(n)),
            "recv_topk_idx": lambda: more(handle.recv_topk_idx),
            "no recv_topk_idx": lambda: None,
            "some recv_topk_idx": lambda: handle.offs,
            "long recv_topk_idx": lambda: torch.cat([handle.recv_topk_idx, handle.recv_topk_idx]),
        }
        if self.wrong not in parts:
            return handle
        return Handled(handle, **{self.wrong.split()[-1]: parts[self.wrong]()})

    def longer(self, t: Tensor, what: str) -> Tensor:
        return torch.cat([t, t[:1]]) if self.wrong == what else t

    def bits(self, t: Tensor, what: str) -> Tensor:
        return more(t.view(torch.uint8)).view(t.dtype) if self.wrong == what else t

    def combine(self, y: Tensor, w: Tensor | None, handle: Any, *, out: Tensor | None = None) -> Tensor:
        handle = getattr(handle, "real", handle)
        self.num_combines += 1
        if out is not None:
            given_back = self.real.combine(y, w, handle, out=out)
            if self.wrong == "out=":
                out.copy_(more(out))
            return given_back.clone() if self.wrong == "another out" else given_back
        self.given |= {"y": y.detach().clone(), "w": None if w is None else w.detach().clone()}
        y = self.changed(y, "", "grad_y")
        w = None if w is None else self.changed(w, "", "grad_recv_weights")
        return self.changed(self.real.combine(y, w, handle), "out", "", "grad of out")


def played(layout: str, wrong: str = "nothing", **options: Any) -> tuple[Spoilt, list[Tensor], rounds.Expected]:
    spec = make_spec(1, **LAYOUTS[layout])
    inputs = make_inputs(spec, [NUM_TOKENS], seed=3)
    expected = expect(spec, inputs, 5, options.get("max_tokens"))
    with Buffer(None, **buffer_kwargs(spec)) as buffer:
        spoilt: Any = Spoilt(buffer, wrong)
        outputs = play(spoilt, inputs, expected, CPU, **options)
    assert not any(t.requires_grad for t in (*inputs.xs, *inputs.topk_weights)), "the inputs stay as they were"
    return spoilt, outputs, expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_buffer_passes_and_gets_nan_past_real_rows(layout: str) -> None:
    """All rows that are no token's are NaN in what combine and both backward ops get, padding included."""
    spoilt, outputs, expected = played(layout, tag=4)
    mine, given = expected.received[0], spoilt.given
    n = len(mine.recv_x)
    assert given["tag"] == 4
    assert given["max_tokens"] is None
    real = torch.zeros(spoilt.capacity, dtype=torch.bool)
    real[:n] = True
    real[mine.padding.nonzero().flatten()] = False
    assert (layout == "aligned") is bool(mine.padding.any())
    assert n < spoilt.capacity or layout == "dropping"
    tokens = spoilt.spec.by_token
    assert given["y"].shape == (spoilt.capacity, spoilt.spec.hidden)
    for name in ("y", "grad of recv_x", "grad of recv_weights"):
        rows = given[name].reshape(spoilt.capacity, -1).isnan()
        assert torch.equal(rows.any(1), rows.all(1))
        assert torch.equal(~rows.all(1), real), name
    assert (given["w"] is None) is tokens
    if not tokens:
        assert given["w"].isnan().tolist() == [row >= n for row in range(spoilt.capacity)]
    assert torch.equal(given["grad of out"], expected.grad_outs[0])
    recv_x, recv_weights, offs, out, grad_y, grad_x, grad_topk_weights = outputs
    assert not any(t.requires_grad for t in outputs)
    assert torch.equal(recv_x, mine.recv_x)
    assert torch.equal(recv_weights, mine.recv_weights)
    assert torch.equal(offs, mine.offs)
    assert torch.equal(out, expected.outs[0])
    assert torch.equal(grad_y, expected.at_combine[0][0])
    assert torch.equal(grad_x, expected.at_dispatch[0][0])
    assert grad_topk_weights.shape == (NUM_TOKENS, spoilt.spec.num_topk)
    assert spoilt.num_combines == 2


SPOILT = {
    "recv_x": ("recv_x", "experts"),
    "long recv_x": ("recv_x: got [37, 20]", "experts"),
    "recv_weights": ("recv_weights", "tokens"),
    "long recv_weights": ("recv_weights: got [37]", "experts"),
    "offs": ("offs", "experts"),
    "num_dropped": ("num_dropped: got", "dropping"),
    "ends": ("ends", "aligned"),
    "row_experts": ("row_experts", "aligned"),
    "recv_topk_idx": ("recv_topk_idx", "tokens"),
    "no recv_topk_idx": ("recv_topk_idx: got None", "tokens"),
    "some recv_topk_idx": ("recv_topk_idx: got a tensor", "experts"),
    "long recv_topk_idx": ("recv_topk_idx: got torch.Size", "tokens"),
    "out": ("out", "experts"),
    "out=": ("out=", "experts"),
    "another out": ("out: got another tensor", "experts"),
    "grad_y": ("grad_y", "tokens"),
    "grad_recv_weights": ("grad_recv_weights", "experts"),
    "grad_x": ("grad_x", "experts"),
    "grad_topk_weights": ("grad_topk_weights", "tokens"),
}


@pytest.mark.parametrize("wrong", SPOILT)
def test_each_wrong_output_is_named(wrong: str) -> None:
    says, layout = SPOILT[wrong]
    with pytest.raises(WrongOutput, match=re.escape(says)) as raised:
        played(layout, wrong)
    assert str(raised.value).startswith(f"{says.partition(':')[0]}:")


@pytest.mark.parametrize("rows_to_spare", [0, 1, 1000])
def test_combine_gets_as_many_rows_to_spare_as_asked(rows_to_spare: int) -> None:
    spoilt, _, expected = played("experts", rows_to_spare=rows_to_spare)
    n = len(expected.received[0].recv_x)
    assert len(spoilt.given["y"]) == min(n + rows_to_spare, spoilt.capacity)


def test_a_round_of_few_tokens_has_their_capacity() -> None:
    spoilt, _, _ = played("experts", max_tokens=NUM_TOKENS)
    assert (spoilt.given["max_tokens"], spoilt.given["tag"]) == (NUM_TOKENS, 0)
    assert len(spoilt.given["y"]) == NUM_TOKENS * 3 < spoilt.capacity
    with pytest.raises(WrongOutput, match="recv_x: got"):
        played("experts", "long recv_x", max_tokens=NUM_TOKENS)


def played_scaled(
    coded: bool, wrong: str = "nothing", layout: str = "experts", tag: int = 0
) -> tuple[Spoilt, list[Tensor]]:
    spec = make_spec(1, hidden=128, dtype=torch.bfloat16, dispatch_dtype=torch.int8, **LAYOUTS[layout])
    inputs = make_inputs(spec, [NUM_TOKENS], seed=3)
    row = RowFormat(torch.int8, 128, torch.float32, 1)
    sent = None if coded else rounds.make_scaled(row, [NUM_TOKENS], seed=1)
    with Buffer(None, **buffer_kwargs(spec)) as buffer:
        spoilt: Any = Spoilt(buffer, wrong)
        return spoilt, play_scaled(spoilt, inputs, sent, CPU, tag)


@pytest.mark.parametrize("layout", ["experts", "tokens", "aligned"])
@pytest.mark.parametrize("coded", [False, True])
def test_rounds_of_codes_notice_wrong_ones(coded: bool, layout: str) -> None:
    spoilt, (codes, scales, recv_weights, offs, out) = played_scaled(coded, layout=layout, tag=2)
    n = int(offs[-1])
    assert [len(t) for t in (codes, scales, recv_weights, out)] == [n, n, n, NUM_TOKENS]
    assert spoilt.given["tag"] == 2
    assert spoilt.given.get("coded", False) is coded
    assert not out.requires_grad
    assert len(spoilt.given["y"]) == n
    names = {"codes": "codes", "scales": "scales", "long codes": "codes", "long scales": "scales", "offs": "offs",
             "recv_weights": "recv_weights", "out": "out", "grad_y": "grad_y"}  # fmt: skip
    if layout != "tokens":
        names["grad_recv_weights"] = "grad_recv_weights"
    for wrong, says in names.items():
        with pytest.raises(WrongOutput, match=f"^{says}: "):
            played_scaled(coded, wrong, layout)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_codes_of_any_bits_are_drawn(num_tokens: int) -> None:
    (few, scales), (codes, _) = rounds.make_scaled(
        RowFormat(torch.int8, 64, torch.float32, 2), [num_tokens, 600], seed=1
    )
    assert (few.shape, few.dtype) == ((num_tokens, 64), torch.int8)
    assert (scales.shape, scales.dtype) == ((num_tokens, 2), torch.float32)
    assert codes.unique().numel() == 256


def test_inputs_of_each_kind() -> None:
    spec = make_spec(2, num_max_tokens_per_rank=400, dtype=torch.bfloat16)
    random, topk, one = (make_inputs(spec, [400, 0], 1, kind) for kind in ("random", "topk", "one_expert"))
    for inputs in (random, topk, one):
        assert inputs.num_tokens == [400, 0]
        assert [list(t.shape) for t in inputs.xs] == [[400, 20], [0, 20]]
        assert {t.dtype for t in inputs.xs} == {torch.bfloat16}
        assert {t.dtype for t in inputs.topk_weights} == {torch.float32}
        assert all(0 <= float(t.min()) <= float(t.max()) <= 1 for t in inputs.topk_weights[:1])
        assert [list(t.shape) for t in (*inputs.topk_idx, *inputs.topk_weights)] == [[400, 3], [0, 3]] * 2
    assert random.topk_idx[0].unique().tolist() == list(range(-1, 9))
    assert (random.topk_idx[0].sort(1).values.diff(dim=1) == 0).any()
    assert topk.topk_idx[0].unique().tolist() == list(range(9))
    assert (topk.topk_idx[0].sort(1).values.diff(dim=1) > 0).all()
    assert one.topk_idx[0].tolist() == [[0, -1, -1]] * 400
    again, other = make_inputs(spec, [400, 0], 1), make_inputs(spec, [400, 0], 2)
    assert torch.equal(again.xs[0], random.xs[0])
    assert not torch.equal(other.xs[0], random.xs[0])


def test_experts_of_ranks_differ() -> None:
    rows = torch.tensor([[2.0, -4.0]], dtype=torch.bfloat16)
    assert [rounds.experts(rows, rank).tolist() for rank in range(3)] == [
        [[2.75, -6.25]],
        [[4.75, -10.25]],
        [[6.75, -14.25]],
    ]
    assert rounds.experts(rows, 0).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int8])
def test_bits_are_compared(dtype: torch.dtype) -> None:
    """NaN equals itself, and zero differs from minus zero."""
    t = torch.zeros(2, 3, dtype=dtype)
    rounds.check_bits("t", t.clone(), t)
    other = t.clone()
    other[1, 2] = other[1, 1] = 1
    value = 1.0 if dtype.is_floating_point else 1
    says = f"t: 2 of 6 elements differ, first at (1, 1): got {value}, expected {value - 1}"
    with pytest.raises(WrongOutput, match=f"^{re.escape(says)}$"):
        rounds.check_bits("t", other, t)
    if dtype.is_floating_point:
        rounds.check_bits("t", torch.full((2,), torch.nan, dtype=dtype), torch.full((2,), torch.nan, dtype=dtype))
        with pytest.raises(WrongOutput, match=r"6 of 6 .* got -0.0, expected 0.0"):
            rounds.check_bits("t", -t, t)
    a_tensor = r"torch\.\S+ \[\d, \d\]"
    for wrong in (t[:1], t.T, t.to(torch.int32)):
        with pytest.raises(WrongOutput, match=rf"^t: got shape and dtype {a_tensor}, expected {a_tensor}$"):
            rounds.check_bits("t", wrong, t)


@pytest.mark.parametrize(("num_terms", "tolerance"), [(4, 1e-4), (64, 1e-4), (256, 2e-4), (6400, 1e-3)])
def test_sums_of_more_terms_may_differ_more(num_terms: int, tolerance: float) -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    rounds.check_close("t", zero + 0.99 * tolerance, zero, num_terms)
    with pytest.raises(WrongOutput, match=r"^t: Tensor-likes are not close"):
        rounds.check_close("t", zero + 1.01 * tolerance, zero, num_terms)
    large = torch.full((3,), 1e6, dtype=torch.float64)
    rounds.check_close("t", large * (1 + 0.99e-4), large, num_terms)
    with pytest.raises(WrongOutput):
        rounds.check_close("t", large * (1 + 1.01e-4), large, num_terms)


@pytest.mark.parametrize("changed", ["nothing", "spec", "seed", "max_tokens", "xs", "topk_idx", "topk_weights"])
def test_what_is_computed_once_is_that_of_its_arguments(changed: str) -> None:
    spec = make_spec(2)
    inputs = make_inputs(spec, [5, 3], 1, "topk")
    first = expected_once(spec, inputs, 1, 12)
    values: dict[str, Any] = {"spec": make_spec(2, sums="invariant"), "seed": 2, "max_tokens": 6}
    spec, seed, max_tokens = (
        values[n] if n == changed else v for n, v in (("spec", spec), ("seed", 1), ("max_tokens", 12))
    )
    if changed in ("xs", "topk_idx", "topk_weights"):
        of_ranks = getattr(inputs, changed)
        of_ranks[0] = of_ranks[0].flip(0)
    got, wanted = expected_once(spec, inputs, seed, max_tokens), expect(spec, inputs, seed, max_tokens)
    assert (got is first) is (changed == "nothing")
    for one, other in zip(got.outs + got.grad_outs, wanted.outs + wanted.grad_outs, strict=True):
        rounds.check_bits("outputs and their gradients", one, other)


def test_what_is_computed_once_is_kept_when_there_is_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rounds, "_KEPT", 1)
    monkeypatch.setattr(kept_rounds, "_kept", {})
    spec = make_spec(2)
    inputs = make_inputs(spec, [5, 3], 1, "topk")
    for seed in (1, 2):
        assert expected_once(spec, inputs, seed) is expected_once(spec, inputs, seed)
    assert len(kept_rounds._kept) == 1
