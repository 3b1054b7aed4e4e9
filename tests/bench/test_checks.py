"""The checks accept right outputs and reject NaN, one wrong token, or another iteration's output."""

from __future__ import annotations

import pytest
import torch
from bench.wrong_outputs import ROTATIONS, case_of, nan, one_bit, one_tenth_more, one_token, one_zero, short
from torch import Tensor

from moe_rt.lab.bench.cases import DTYPES, Case
from moe_rt.lab.bench.expect import Expectation, dense, make_grad_out, make_router
from moe_rt.lab.bench.inputs import make_inputs
from moe_rt.lab.testing.rounds import WrongOutput

NUMBER = 3  # index of the input whose outputs are checked: the second of two
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_rank = pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1), (3, 0), (3, 2)])


def delivered(case: Case, rank: int, i: int) -> tuple[Tensor, Tensor]:
    """Return dispatch's right output, from a loop over the tokens of all ranks; checks accept any order."""
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
    """Return combine's right output, from a loop over tokens and their experts; a scaled row is multiplied by 1, 2, 4
    or 8."""
    tokens = make_inputs(case, 0, rank, i % ROTATIONS)
    out = torch.zeros(case.tokens, case.hidden, dtype=torch.float64)
    for t in range(case.tokens):
        for weight, expert in zip(tokens.topk_weights[t].tolist(), tokens.topk_idx[t].tolist(), strict=True):
            out[t] += weight * ((1, 2, 4, 8)[expert % 4] if scaled else 1) * tokens.x[t].double()
    return out.to(case.torch_dtype)


@every_dtype
@every_rank
def test_rows_that_dispatch_brought(ranks: int, rank: int, dtype: str) -> None:
    case = case_of(ranks, dtype)
    expect = Expectation(case, 0, rank, ROTATIONS)
    rows, experts = delivered(case, rank, NUMBER)
    expect.rows(NUMBER, rows, experts)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    expect.rows(NUMBER, rows[order], experts[order])

    sent_to_another = experts.clone()
    sent_to_another[0] = (experts[0] + 1) % case.local_experts[rank]
    for wrong_rows, wrong_experts in (
        *((spoil(rows), experts) for spoil in (nan, one_token, one_zero)),
        (short(rows), short(experts)),
        (torch.cat((rows, rows[:1])), torch.cat((experts, experts[:1]))),
        (one_bit(rows), experts),
        (rows, sent_to_another),
        (rows, experts + 1),
        (rows.roll(1, 0), experts),
        (rows[:, :-1], experts),
        (rows.float() if dtype != "fp32" else rows.double(), experts),
        delivered(case, rank, NUMBER - 1),
        delivered(case, (rank + 1) % ranks, NUMBER if ranks > 1 else NUMBER - 1),
    ):
        with pytest.raises(WrongOutput, match=f"rank {rank} received"):
            expect.rows(NUMBER, wrong_rows, wrong_experts)


def test_a_row_of_another_type_is_reported() -> None:
    """A row of another dtype is rejected, even if all values are equal and a single row leaves no order."""
    case = case_of(1, "bf16", tokens=1, topk=1, experts=1)
    rows, experts = delivered(case, 0, NUMBER)
    Expectation(case, 0, 0, ROTATIONS).rows(NUMBER, rows, experts)
    with pytest.raises(WrongOutput, match=r"received torch.float32 \[1, 12\]"):
        Expectation(case, 0, 0, ROTATIONS).rows(NUMBER, rows.float(), experts)


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
    """Rows are multiplied by 1, 2, 4 or 8, differently for neighbouring experts; rank 1 of two has experts 4 to 6."""
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
    if name != "router.grad":  # one norm for all experts, which a single token does not change much
        wrong += [one_token(right[name]), one_zero(right[name]), one_tenth_more(right[name])]
    for value in wrong:
        with pytest.raises(WrongOutput, match=f"rank 1: {name} is"):
            expect.layer(NUMBER, {**right, name: value})


def test_a_token_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 token may deviate by a twentieth of its own norm, or of a thousandth of the largest if that is more."""
    want = torch.tensor([[100.0, 0.0], [1.0, 0.0], [0.001, 0.0]])
    monkeypatch.setattr("moe_rt.lab.bench.expect.dense", lambda *arguments: {"out": want})
    expect = Expectation(case_of(1, "bf16", op="layer"), 0, 0, ROTATIONS)
    for right in ([[104, 0], [1, 0], [0, 0]], [[100, 0], [1, 0.04], [0, 0]], [[100, 0], [1, 0], [0.004, 0]]):
        expect.layer(NUMBER, {"out": torch.tensor(right)})
    for wrong in ([[106, 0], [1, 0], [0, 0]], [[100, 0], [1, 0.06], [0, 0]], [[100, 0], [1, 0], [0.007, 0]]):
        with pytest.raises(WrongOutput):
            expect.layer(NUMBER, {"out": torch.tensor(wrong)})


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.05), ("fp16", 0.01), ("fp32", 1e-4), ("fp64", 1e-4)])
def test_how_far_a_token_may_be_off(monkeypatch: pytest.MonkeyPatch, dtype: str, most: float) -> None:
    monkeypatch.setattr("moe_rt.lab.bench.expect.dense", lambda *arguments: {"out": torch.tensor([[1.0, 0.0]])})
    expect = Expectation(case_of(1, dtype, op="layer"), 0, 0, ROTATIONS)
    expect.layer(NUMBER, {"out": torch.tensor([[1.0, 0.95 * most]])})
    with pytest.raises(WrongOutput):
        expect.layer(NUMBER, {"out": torch.tensor([[1.0, 1.05 * most]])})


def test_the_router_s_gradient_is_measured_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's gradient is compared as a whole, since gradients of some experts nearly cancel."""
    monkeypatch.setattr(
        "moe_rt.lab.bench.expect.dense", lambda *arguments: {"router.grad": torch.tensor([[100.0], [0.2]])}
    )
    expect = Expectation(case_of(1, "bf16", op="layer"), 0, 0, ROTATIONS)
    expect.layer(NUMBER, {"router.grad": torch.tensor([[100.0], [4.0]])})
    with pytest.raises(WrongOutput):
        expect.layer(NUMBER, {"router.grad": torch.tensor([[100.0], [6.0]])})


def test_logits_of_the_router_have_the_spread_of_its_inputs() -> None:
    """Larger ones would make softmax pick nearly one expert, smaller ones weigh all alike."""
    case = case_of(1, "fp32", tokens=500, hidden=256, experts=64)
    logits = make_inputs(case, 0, 0, 0).x @ make_router(case).weight.detach().T
    assert float(logits.std()) == pytest.approx(1.0, rel=0.05)
