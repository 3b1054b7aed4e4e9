"""What the benchmark's checks let pass and what they catch: NaN, one wrong token, another iteration's output."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rt.bench.cases import DTYPES, Case
from moe_rt.bench.contestants.base import Delivery
from moe_rt.bench.contestants.permuted import Permuted
from moe_rt.bench.dense import dense, make_grad_out
from moe_rt.bench.expect import Expectation
from moe_rt.bench.inputs import make_inputs
from moe_rt.bench.measure import measure
from moe_rt.bench.processor import Processor
from moe_rt.bench.world import World
from moe_rt.testing.rounds import WrongOutput

ROTATIONS = 2
NUMBER = 3  # the number of the input whose outputs are checked: the second of two
Spoil = Callable[[Tensor], Tensor]

two_dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp64"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_rank = pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1), (3, 0), (3, 2)])


def case_of(ranks: int, dtype: str, **changes: Any) -> Case:
    """Seven experts, of which some ranks have more than others."""
    sizes = dict(tokens=9, hidden=12, topk=3, experts=7, intermediate=8)
    return Case(**{**sizes, "ranks": ranks, "dtype": dtype, **changes})


def delivered(case: Case, rank: int, i: int) -> tuple[Tensor, Tensor]:
    """What dispatch must bring, by a loop over the tokens of all ranks; in an order that nobody asks for."""
    first = sum(case.local_experts[:rank])
    rows, experts = [], []
    for source in range(case.ranks):
        tokens = make_inputs(case, 0, source, i % ROTATIONS)
        for x, chosen in zip(tokens.x, tokens.topk_idx.tolist(), strict=True):
            for expert in chosen:
                if first <= expert < first + case.local_experts[rank]:
                    rows.append(x)
                    experts.append(expert - first)
    return torch.stack(rows), torch.tensor(experts)


def combined(case: Case, rank: int, i: int, scaled: bool) -> Tensor:
    """What combine must return, by a loop over tokens and their experts; a scaled row is multiplied by 1, 2, 4 or 8."""
    tokens = make_inputs(case, 0, rank, i % ROTATIONS)
    out = torch.zeros(case.tokens, case.hidden, dtype=torch.float64)
    for t in range(case.tokens):
        for weight, expert in zip(tokens.topk_weights[t].tolist(), tokens.topk_idx[t].tolist(), strict=True):
            out[t] += weight * ((1, 2, 4, 8)[expert % 4] if scaled else 1) * tokens.x[t].double()
    return out.to(case.torch_dtype)


def nan(out: Tensor) -> Tensor:
    out = out.clone()
    out[-1, -1] = torch.nan
    return out


def one_token(out: Tensor) -> Tensor:
    """The last token has the first one's output."""
    return torch.cat((out[:-1], out[:1]))


def one_zero(out: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(out[:1]), out[1:]))


def one_tenth_more(out: Tensor) -> Tensor:
    return torch.cat((out[:1] * 1.1, out[1:]))


def short(out: Tensor) -> Tensor:
    return out[1:]


@every_dtype
@every_rank
def test_rows_that_dispatch_brought(ranks: int, rank: int, dtype: str) -> None:
    case = case_of(ranks, dtype)
    expect = Expectation(case, 0, rank, ROTATIONS)
    rows, experts = delivered(case, rank, NUMBER)
    expect.rows(NUMBER, rows, experts)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    expect.rows(NUMBER, rows[order], experts[order])

    one_bit = rows.clone()
    one_bit.view(torch.uint8)[-1, 0] ^= 1
    sent_to_another = experts.clone()
    sent_to_another[0] = (experts[0] + 1) % case.local_experts[rank]
    for wrong_rows, wrong_experts in (
        *((spoil(rows), experts) for spoil in (nan, one_token, one_zero)),
        (short(rows), short(experts)),
        (torch.cat((rows, rows[:1])), torch.cat((experts, experts[:1]))),
        (one_bit, experts),
        (rows, sent_to_another),
        (rows.roll(1, 0), experts),
        (rows[:, :-1], experts),
        (rows.float() if dtype != "fp32" else rows.double(), experts),
        delivered(case, rank, NUMBER - 1),
        delivered(case, (rank + 1) % ranks, NUMBER if ranks > 1 else NUMBER - 1),
    ):
        with pytest.raises(WrongOutput, match=f"rank {rank} received"):
            expect.rows(NUMBER, wrong_rows, wrong_experts)


@pytest.mark.parametrize("scaled", [False, True])
@every_dtype
@every_rank
def test_tokens_that_combine_returned(ranks: int, rank: int, dtype: str, scaled: bool) -> None:
    case = case_of(ranks, dtype)
    expect = Expectation(case, 0, rank, ROTATIONS)
    out = combined(case, rank, NUMBER, scaled)
    expect.combined(NUMBER, out, scaled)
    for spoil in (nan, one_token, one_zero, one_tenth_more):
        with pytest.raises(WrongOutput, match=f"rank {rank} combined 1 tokens wrongly"):
            expect.combined(NUMBER, spoil(out), scaled)
    for wrong in (short(out), combined(case, rank, NUMBER - 1, scaled), combined(case, rank, NUMBER, not scaled)):
        with pytest.raises(WrongOutput, match=f"rank {rank}"):
            expect.combined(NUMBER, wrong, scaled)
    if ranks > 1:
        with pytest.raises(WrongOutput, match=f"rank {rank} combined"):
            expect.combined(NUMBER, combined(case, 1 - min(1, rank), NUMBER, scaled), scaled)


@every_dtype
def test_rows_are_scaled_by_their_expert(dtype: str) -> None:
    """By 1, 2, 4 or 8, of which neighbours have different ones; rank 1 of two has experts 4 to 6."""
    case = case_of(2, dtype)
    rows = torch.ones(3, 12, dtype=case.torch_dtype)
    scaled = Expectation(case, 0, 1, ROTATIONS).scale(rows, torch.tensor([2, 0, 1]))
    assert scaled.dtype == rows.dtype
    assert scaled[:, 0].tolist() == [4, 1, 2]


@every_dtype
@pytest.mark.parametrize("name", ["out", "grad_x", "router.grad"])
def test_outputs_of_a_layer(name: str, dtype: str) -> None:
    case = case_of(2, dtype, op="layer")
    expect = Expectation(case, 0, 1, ROTATIONS)
    right, before = (dense(case, make_inputs(case, 0, 1, i).x, make_grad_out(case, 1)) for i in (1, 0))
    expect.layer(NUMBER, {key: value.to(case.torch_dtype) for key, value in right.items()})
    wrong = [nan(right[name]), short(right[name]), before[name], torch.zeros_like(right[name]), None]
    if name != "router.grad":  # one norm for all experts, which a single token does not move far
        wrong += [one_token(right[name]), one_zero(right[name]), one_tenth_more(right[name])]
    for value in wrong:
        with pytest.raises(WrongOutput, match=f"rank 1: {name} is"):
            expect.layer(NUMBER, {**right, name: value})


@pytest.fixture(autouse=True)
def _no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of a short measurement."""
    monkeypatch.setattr("gc.collect", int)


class Alone(Permuted):
    """The exchange of the only rank: what it sends comes back. Every tensor on its way may be spoiled."""

    name = "alone"
    place, spoil = "", staticmethod(one_token)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        return counts

    def exchange_rows(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return rows

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        x = _SpoilGradient.apply(x, self._at("grad_x"))
        topk_weights = _SpoilGradient.apply(topk_weights, self._at("grad_weights"))
        delivery = super().dispatch(x, topk_idx, topk_weights)
        delivery.rows = self._at("rows")(delivery.rows)
        return delivery

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        out = super().combine(y, delivery)
        return out + (self._at("out")(out) - out).detach()

    def _at(self, place: str) -> Spoil:
        return self.spoil if place == self.place else _as_it_is


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, spoil: Spoil) -> Tensor:
        ctx.spoil = spoil
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.spoil(grads[0]), None


class OfTheCallBefore:
    """Spoils a tensor by handing out the one of the call before."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        before, self._last = self._last, tensor.detach().clone()
        return tensor if before is None or before.shape != tensor.shape else before


class OfTheFirstCall(OfTheCallBefore):
    def __call__(self, tensor: Tensor) -> Tensor:
        self._last = tensor.detach().clone() if self._last is None else self._last
        return self._last


def errors_of(op: Any, dtype: str, place: str, spoil: Any, iters: int = 3) -> list[str]:
    """What the checks say of each phase, as in a run of the benchmark."""
    case = case_of(1, dtype, op=op)
    stands_in: Any = SimpleNamespace(all_gather=lambda text, timeout_s: [text], wait=int)
    group: Any = None
    world = World(0, 1, group, stands_in, stands_in, Processor("cpu"), mpi=False)
    contestant = Alone(case, world)
    contestant.place, contestant.spoil = place, spoil
    inputs = [make_inputs(case, 0, 0, i) for i in range(ROTATIONS)]
    with torch.no_grad():
        steps = contestant.steps(inputs, Expectation(case, 0, 0, ROTATIONS))
    return [" ".join(times.errors) for times in measure(world, steps, iters, 1, False, lambda part: None)]


@two_dtypes
@pytest.mark.parametrize("op", ["dispatch", "combine", "pair", "layer"])
def test_an_honest_contestant_passes(op: str, dtype: str) -> None:
    assert not any(errors_of(op, dtype, "", nan))


@two_dtypes
@pytest.mark.parametrize("spoil", [nan, one_token, one_zero, OfTheCallBefore, OfTheFirstCall], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    ("op", "place"), [("dispatch", "rows"), ("pair", "rows"), ("pair", "out"), ("combine", "out"), ("layer", "out")]
)
def test_a_contestant_that_cheats_is_caught(op: str, place: str, spoil: Any, dtype: str) -> None:
    """By the check of its op, in each phase. Eight iterations end in a turn of two, as many as there are inputs."""
    found = errors_of(op, dtype, place, spoil() if isinstance(spoil, type) else spoil, iters=8)
    assert all(found), found


@two_dtypes
@pytest.mark.parametrize("spoil", [nan, one_token, one_zero, OfTheCallBefore], ids=lambda s: s.__name__)
@pytest.mark.parametrize("place", ["grad_x", "grad_weights"])
def test_a_layer_whose_gradients_are_wrong_is_caught(place: str, spoil: Any, dtype: str) -> None:
    """In one token: in what its experts say of it, or in what they say of its weights, and by the backward only."""
    forward, backward = errors_of("layer", dtype, place, spoil() if isinstance(spoil, type) else spoil)
    assert forward == ""
    assert "grad" in backward
