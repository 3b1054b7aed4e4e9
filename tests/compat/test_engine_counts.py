"""Counts that the compiled engine makes for deep_ep equal plain loops, for random routings and at every bound."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rt import _engine

GUARD = 77  # in memory next to an output, which must not change


def routing(rng: random.Random, tokens: int, topk: int, experts: int) -> Tensor:
    """Return ids with some of no expert: -1, below that, E and above."""
    ids = [rng.choice([*range(experts), -1, -5, experts, experts + 3]) for _ in range(tokens * topk)]
    return torch.tensor(ids, dtype=torch.int64).view(tokens, topk)


def counted(ids: Tensor, experts: int, ranks: int) -> tuple[list[int], list[int], list[list[bool]], bool]:
    per_rank, per_expert, repeats = [0] * ranks, [0] * experts, False
    in_rank = [[False] * ranks for _ in ids]
    for token, row in enumerate(ids.tolist()):
        valid = [e for e in row if 0 <= e < experts]
        repeats |= len(set(valid)) < len(valid)
        for expert in valid:
            per_expert[expert] += 1
            in_rank[token][expert // (experts // ranks)] = True
        for rank in range(ranks):
            per_rank[rank] += in_rank[token][rank]
    return per_rank, per_expert, in_rank, repeats


def outputs(tokens: int, experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((ranks + 1,), GUARD, dtype=torch.int32),
        torch.full((experts + 1,), GUARD, dtype=torch.int32),
        torch.ones(tokens * ranks + 1, dtype=torch.bool),
    )


def arguments(ids: Tensor, experts: int, ranks: int, to: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (ids.data_ptr(), len(ids), ids.shape[1], experts, ranks, *(t.data_ptr() for t in to))


CASES = [(0, 1, 1, 1), (1, 1, 2, 2), (7, 3, 4, 2), (9, 4, 12, 3), (5, 2, 6, 6), (6, 5, 8, 1)]


@pytest.mark.parametrize(("tokens", "topk", "experts", "ranks"), CASES)
def test_a_routing_is_counted(tokens: int, topk: int, experts: int, ranks: int) -> None:
    rng = random.Random(1)
    for _ in range(20):
        ids, found = routing(rng, tokens, topk, experts), outputs(tokens, experts, ranks)
        per_rank, per_expert, in_rank, repeats = counted(ids, experts, ranks)
        assert _engine.count_routing(*arguments(ids, experts, ranks, found)) is repeats
        assert found[0].tolist() == [*per_rank, GUARD]
        assert found[1].tolist() == [*per_expert, GUARD]
        assert found[2][:-1].view(tokens, ranks).tolist() == in_rank
        assert found[2][-1]
        assert _engine.counts_differ(*arguments(ids, experts, ranks, found)) is repeats
        for which, entries in itertools.product(range(3), (0, -2)):
            if found[which].numel() > 1 and not repeats:
                changed = [t.clone() for t in found]
                changed[which][entries] = ~changed[which][entries] if which == 2 else changed[which][entries] + 1
                assert _engine.counts_differ(*arguments(ids, experts, ranks, tuple(changed)))


def test_experts_named_twice_and_copies_of_ids() -> None:
    rng = random.Random(2)
    for tokens, topk in itertools.product((0, 1, 3), (1, 2, 4)):
        for _ in range(20):
            ids = torch.tensor([rng.randrange(-2, 9) for _ in range(tokens * topk)], dtype=torch.int64)
            rows = [ids[t * topk : (t + 1) * topk].tolist() for t in range(tokens)]
            valid = [[e for e in row if e >= 0] for row in rows]
            twice = any(len(set(row)) < len(row) for row in valid)
            assert _engine.names_twice(ids.data_ptr(), tokens, topk) is twice
            copy = _engine.copy_ids(ids.data_ptr(), tokens, topk)
            assert copy == (None if twice else ids.numpy().tobytes())
            if copy:
                assert _engine.ids_equal(copy, ids.data_ptr())
                ids[-1] += 100
                assert not _engine.ids_equal(copy, ids.data_ptr())


@pytest.mark.parametrize("alignment", [1, 4])
def test_ids_are_widened(alignment: int) -> None:
    ids = torch.tensor([0, -1, 2, 2, 3, -7, 0, 2, 2, 2], dtype=torch.int32)
    for number in range(len(ids) + 1):
        out = torch.full((number + 1,), GUARD, dtype=torch.int64)
        counts = _engine.widen_ids(ids.data_ptr(), number, 3, alignment, out.data_ptr())
        assert out.tolist() == [*ids[:number].tolist(), GUARD]
        named = ids[:number].tolist()
        assert counts == [-(-named.count(e) // alignment) * alignment for e in range(3)]


TOKENS, RANKS, LOCAL, SLOTS = 4, 3, 2, 5
# Source, token and rows of recv_x of each pulled token. Expert 1's rows begin at 5; -1 is dropped.
PULLED = [(0, 3, [0, 5]), (0, 1, [6]), (1, 2, [-1, 7]), (2, 0, [1, -1]), (2, 3, [2])]


def plan_of(pulled: list[tuple[int, int, list[int]]]) -> tuple[Tensor, _engine.Shape]:
    shape = _engine.Shape(
        num_ranks=RANKS, num_experts=LOCAL * RANKS, num_max_tokens=TOKENS, hidden=8, num_topk=2, elem_bytes=4,
        by_token=False, alignment=1, num_pushed_tokens=0, num_pushed_rows=0, sums=0, depth=1, node_of=[],
    )  # fmt: skip
    plan = torch.full((shape.recv_plan_ints(LOCAL),), GUARD, dtype=torch.int32)
    plan[_engine.RecvPlan.num_pulled] = len(pulled)
    rows_at = shape.recv_ids_at(LOCAL) - 2 * RANKS * TOKENS * 2
    first = 0
    for i, (source, token, rows) in enumerate(pulled):
        at = rows_at - 4 * RANKS * TOKENS + 4 * i
        plan[at : at + 4] = torch.tensor([token, source, first, len(rows)])
        plan[rows_at + first : rows_at + first + len(rows)] = torch.tensor(rows)
        first += len(rows)
    return plan, shape


def test_rows_of_a_dispatch_are_described() -> None:
    plan, shape = plan_of(PULLED)
    tokens = torch.full((LOCAL * SLOTS,), GUARD, dtype=torch.int32)
    ranges = torch.full((LOCAL * RANKS + 1,), GUARD, dtype=torch.int64)
    _engine.describe_rows(plan.data_ptr(), shape, LOCAL, SLOTS, tokens.data_ptr(), ranges.data_ptr())
    assert tokens.tolist() == [3, 0, 3, GUARD, GUARD, 3, 1, 2, GUARD, GUARD]
    begins_and_counts = [(0, 1), (1, 0), (1, 2), (0, 2), (2, 1), (3, 0)]
    assert ranges.tolist() == [*(begin << 32 | count for begin, count in begins_and_counts), GUARD]


@pytest.mark.parametrize("words", [1, 3])
def test_scales_are_put_in_columns(words: int) -> None:
    plan, shape = plan_of(PULLED)
    scales = torch.arange(LOCAL * SLOTS * words, dtype=torch.int32) + 1000
    columns = torch.full((LOCAL, words, SLOTS), GUARD, dtype=torch.int32)
    _engine.put_in_columns(plan.data_ptr(), shape, LOCAL, SLOTS, scales.data_ptr(), columns.data_ptr(), words)
    expected = torch.full_like(columns, GUARD)
    for row in (0, 5, 6, 7, 1, 2):
        expected[row // SLOTS, :, row % SLOTS] = scales.view(-1, words)[row]
    assert torch.equal(columns, expected)


@pytest.mark.parametrize("offs", [[0, 0], [2, 2, 5], [1, 4], [3]], ids=str)
def test_each_row_has_its_source(offs: list[int]) -> None:
    given = torch.tensor(offs, dtype=torch.int32)
    owners: list[int] = []
    for source, end in enumerate(offs):
        owners += [source] * (end - len(owners))
    for rows in range(8):
        out = torch.full((rows + 1,), GUARD, dtype=torch.int64)
        _engine.source_ranks(given.data_ptr(), len(offs), rows, out.data_ptr())
        assert out.tolist() == [*(owners + [-1] * 8)[:rows], GUARD]


@pytest.mark.parametrize(("wide", "topk"), [(2, 2), (5, 3)])
def test_weights_are_added_in_rank_order(wide: int, topk: int) -> None:
    rng = random.Random(3)
    for ranks, tokens in itertools.product((1, 3), (0, 1, 6)):
        in_rank = torch.tensor([[rng.random() < 0.6 for _ in range(ranks)] for _ in range(tokens)]).view(tokens, ranks)
        offs = in_rank.sum(0).cumsum(0).int() if tokens else torch.zeros(ranks, dtype=torch.int32)
        rows = torch.randn(int(offs[-1]) + 1, wide) * 10.0 ** torch.randint(-3, 4, (int(offs[-1]) + 1, wide))
        out = torch.full((tokens * topk + 1,), float(GUARD))
        given: tuple[Any, ...] = (offs.data_ptr(), in_rank.data_ptr(), tokens, ranks, topk, out.data_ptr())
        _engine.add_weights(rows.data_ptr(), wide, *given)
        expected, row = torch.zeros(tokens, topk), 0
        for rank, token in itertools.product(range(ranks), range(tokens)):
            if in_rank[token, rank]:
                expected[token] += rows[row, :topk]
                row += 1
        assert torch.equal(out[:-1].view(tokens, topk), expected)
        assert out[-1] == GUARD


def test_ranks_that_return_fewer_rows_than_tokens_asked() -> None:
    """A rank whose rows end before its tokens do returns no others; the next rank's rows begin at its end."""
    rows, offs = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([1, 3], dtype=torch.int32)
    in_rank, out = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2)
    _engine.add_weights(rows.data_ptr(), 1, offs.data_ptr(), in_rank.data_ptr(), 2, 2, 1, out.data_ptr())
    assert out.tolist() == [11.0, 100.0]
    one = torch.tensor([[True], [False]])
    offs = torch.tensor([2], dtype=torch.int32)
    _engine.add_weights(rows.data_ptr(), 1, offs.data_ptr(), one.data_ptr(), 2, 1, 1, out.data_ptr())
    assert out.tolist() == [1.0, 0.0]
