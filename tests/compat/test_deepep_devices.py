"""Counts and sums of deep_ep for tensors on a GPU, where torch computes them: the same as the engine's for a CPU.

A tensor here says that it is not on a CPU; everything else of it is a CPU tensor's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat.oracle import expert_rows, make_job
from compat.test_counts import routing
from compat.test_normal import on_ranks

from moe_rt.buffer.handle import Handle
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep import home
from moe_rt.compat.deep_ep import layout as layouts

RANKS = 4
SIZES = [(0, 2, 4), (1, 1, 4), (37, 3, 8), (64, 8, 60)]


class OnGpu(torch.Tensor):
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(OnGpu)


def layout_on_gpu(layout: layouts.Layout) -> layouts.Layout:
    return layouts.Layout(*map(on_gpu, layout))


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype is other.dtype
    assert one.tolist() == other.tolist()
    assert one.shape == other.shape


@pytest.mark.parametrize(("tokens", "topk", "experts"), SIZES)
def test_a_layout(tokens: int, topk: int, experts: int) -> None:
    ids = routing(tokens, topk, experts)
    ids[: tokens // 2, :1] = experts  # no expert
    right = layouts.layout_of(ids, experts, RANKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts._engine, "count_routing", None)  # it reads memory of the host
        found = layouts.layout_of(on_gpu(ids), experts, RANKS)
    for one, other in zip(found, right, strict=True):
        assert_same(one, other)
    named = [[e for e in row if 0 <= e < experts] for row in ids.tolist()]
    visited = [[any(e * RANKS // experts == rank for e in row) for rank in range(RANKS)] for row in named]
    assert right.in_rank.tolist() == visited
    assert right.per_rank.tolist() == [sum(column) for column in zip(*visited, strict=True)] or not tokens
    assert right.per_expert.tolist() == [int((ids == e).sum()) for e in range(experts)]
    assert not layouts.differs(on_gpu(ids), layout_on_gpu(right))


@pytest.mark.parametrize("which", range(3))
def test_a_count_that_is_one_off(which: int) -> None:
    ids = routing(9, 2, 8)
    layout = layouts.layout_of(ids, 8, RANKS)
    last = layout[which].view(-1)[-1:]
    last.copy_(~last if last.dtype is torch.bool else last + 1)
    assert layouts.differs(on_gpu(ids), layout_on_gpu(layout))


@pytest.mark.parametrize("place", [on_gpu, torch.clone], ids=["gpu", "cpu"])
def test_an_expert_named_twice(place: Any) -> None:
    twice_or_not = {(6, -1, 6): True, (6, 6, 1): True, (-1, -1, 0): False, (0, -1, 0): True, (0, 1, 2): False}
    for row, twice in twice_or_not.items():
        ids = routing(9, 3, 8)
        ids[4] = torch.tensor(row)
        assert layouts.repeats(place(ids)) is twice
        layout = layouts.counted_by_torch(ids, 8, RANKS)
        assert layouts.differs(place(ids), layouts.Layout(*map(place, layout))) is twice
    assert not layouts.repeats(place(routing(9, 1, 8)))


def test_a_copy_of_ids() -> None:
    """A GPU's is a tensor, and not searched for an expert that a token names twice."""
    ids = on_gpu(routing(9, 3, 8))
    copy: Any = layouts.copied_ids(ids)
    assert layouts.ids_equal(copy, ids)
    own = ids.clone()
    ids[8] = torch.tensor([1, 2, 5])
    assert not layouts.ids_equal(copy, ids)
    assert torch.equal(copy, own)
    fewer = own.clone()
    fewer[:, 1] = -1
    assert not layouts.names_others(copy, fewer)
    fewer[2, 1] = 5 if int(own[2, 1]) != 5 else 4
    assert layouts.names_others(copy, fewer)
    assert not layouts.ids_equal(copy, torch.empty_like(own, device="meta"))
    assert not layouts.ids_equal(b"", on_gpu(torch.zeros(0, 3).long()))
    ids[3] = 2
    assert layouts.copied_ids(ids) is not None


@pytest.mark.parametrize("alignment", [1, 4])
def test_ids_become_wide(alignment: int) -> None:
    ids = torch.randint(-1, 3, (7, 2), dtype=torch.int32)
    plan = torch.cat([torch.tensor([7, 7, 7]).int(), ids.flatten(), torch.tensor([1, 1]).int()])
    for given in (plan, on_gpu(plan)):
        wide, counts = layouts.local_ids(given, 3, 7, 2, 3, alignment)
        assert_same(wide, ids.long())
        assert counts == [-(-int((ids == e).sum()) // alignment) * alignment for e in range(3)]
        none, counts = layouts.local_ids(given, 3, 0, 2, 3, alignment)
        assert (none.shape, counts) == ((0, 2), [0, 0, 0])


@pytest.mark.parametrize("num_rows", [0, 1, 5, 8])
def test_sources_of_received_rows(num_rows: int) -> None:
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    with torch.device("meta"):
        found = home.source_ranks(on_gpu(offs), num_rows)
    assert_same(found, home.source_ranks(offs, num_rows))


@pytest.mark.parametrize("num_topk", [1, 3, 8])
def test_weights_that_return(num_topk: int) -> None:
    in_rank = torch.rand(9, RANKS) < 0.5
    offs = in_rank.sum(0).cumsum(0).int()
    rows, handle = torch.randn(40, 8), Handle(offs=offs, recv_plan=offs, send_plan=offs, tag=0)
    received: list[Any] = [SimpleNamespace(x=x, handle=handle) for x in (rows, on_gpu(rows))]
    with torch.device("meta"):
        one, other = (home.add_weights(each, in_rank, num_topk) for each in received)
    assert_same(other, one)
    assert other.is_contiguous()
    for token, visits in enumerate(in_rank.tolist()):
        total = torch.zeros(8)
        for rank in range(RANKS):
            if visits[rank]:
                before = int(offs[rank - 1]) if rank else 0
                total += rows[before + int(in_rank[:token, rank].sum())]
        assert torch.equal(one[token], total[:num_topk])


@pytest.mark.parametrize("tokens", [[5, 16], [16, 16], [0, 3]], ids=str)
@pytest.mark.parametrize("num_local", [2, 4])
def test_rows_and_scales_at_fixed_places(tokens: list[int], num_local: int) -> None:
    job = make_job(2, tokens, 512, 3, 2 * num_local)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        _, _, handle, _, _ = buffer.low_latency_dispatch(job.x[rank], job.topk_idx[rank], 16, 2 * num_local)
        found, ranges = torch.full_like(handle[0], 77), torch.full_like(handle[1], 77)
        with torch.device("meta"):  # tensors are made where the results are
            layouts.describe_rows(handle.buffer, handle.plan, on_gpu(found), on_gpu(ranges))
        assert torch.equal(ranges, handle[1])
        rows = torch.randn(num_local * 32, 4)
        columns = [torch.zeros(num_local, 4, 32).transpose(1, 2) for _ in range(2)]
        layouts.put_in_columns(handle.buffer, handle.plan, rows, columns[0])
        layouts.put_in_columns(handle.buffer, handle.plan, rows, on_gpu(columns[1]))
        for expert in range(num_local):
            number = len(expert_rows(job, rank, expert))
            assert found[expert, :number].tolist() == [token for _, token in expert_rows(job, rank, expert)]
            for each in columns:
                assert torch.equal(each[expert, :number], rows.view(num_local, 32, 4)[expert, :number])

    on_ranks(job, work)


def test_a_layout_is_known_until_something_is_written() -> None:
    """Only its own tensors are known, in their places, and only those of the last computation."""
    known = layouts.KnownLayout()
    ids = routing(9, 3, 8)
    assert not known.knows(ids, layouts.layout_of(ids, 8, RANKS))
    layout = known.compute(ids, 8, RANKS)
    assert known.knows(ids, layout)
    assert not known.knows(ids.clone(), layout)
    assert not known.knows(None, layout)
    for which in range(3):
        parts = list(layout)
        parts[which] = parts[which].clone()
        assert not known.knows(ids, layouts.Layout(*parts))
    for which in range(4):
        layout = known.compute(ids, 8, RANKS)
        assert known.knows(ids, layout)
        written = (ids, *layout)[which]
        written.copy_(written.clone())
        assert not known.knows(ids, layout)
    other = known.compute(ids.clone(), 8, RANKS)
    assert not known.knows(ids, other)


@pytest.mark.parametrize("kind", ["an expert twice", "columns", "inference"])
def test_layouts_that_are_compared_at_every_dispatch(kind: str) -> None:
    known, ids = layouts.KnownLayout(), routing(9, 3, 8)
    known.compute(ids, 8, RANKS)
    if kind == "an expert twice":
        ids[3] = 2
    elif kind == "columns":
        ids = ids.T.contiguous().T
    else:
        with torch.inference_mode():
            ids = routing(9, 3, 8)
    assert not known.knows(ids, known.compute(ids, 8, RANKS))
    twice = on_gpu(routing(9, 3, 8))
    twice[3] = 2
    assert known.knows(twice, known.compute(twice, 8, RANKS))


@pytest.mark.parametrize("num_ranks", [1, 4, 8, 12, 16, 24])
def test_domains_of_eight_ranks(num_ranks: int) -> None:
    in_rank = torch.rand(20, num_ranks) < 0.1
    found = layouts.per_domain(in_rank)
    if num_ranks <= 8 or num_ranks % 8:
        assert found is None
    else:
        assert found is not None
        assert found.dtype is torch.int32
        parts = [in_rank[:, 8 * domain : 8 * (domain + 1)] for domain in range(num_ranks // 8)]
        assert found.tolist() == [sum(map(any, part.tolist())) for part in parts]
