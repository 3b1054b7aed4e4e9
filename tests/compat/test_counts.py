"""Counts of deep_ep in C++ equal those of torch, which other devices take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat.oracle import expert_rows, make_job
from compat.test_normal import on_ranks

from moe_rt.buffer.handle import Handle
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep import home
from moe_rt.compat.deep_ep import layout as layouts

RANKS = 4


def routing(num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :num_topk].contiguous()
    ids[torch.rand(ids.shape) < 0.25] = -1
    return ids


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(0, 2, 4), (1, 1, 4), (37, 3, 8), (64, 8, 60)])
def test_a_layout(tokens: int, topk: int, experts: int) -> None:
    ids = routing(tokens, topk, experts)
    ids[: tokens // 2, :1] = experts + 5  # no expert
    found, right = (count(ids, experts, RANKS) for count in (layouts.layout_of, layouts.counted_by_torch))
    for one, other in zip(found, right, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    assert not layouts.differs(ids, found)


@pytest.mark.parametrize("which", range(3))
def test_a_count_that_is_one_off(which: int) -> None:
    ids = routing(9, 2, 8)
    layout = layouts.layout_of(ids, 8, RANKS)
    last = layout[which].view(-1)[-1:]
    last.copy_(~last if last.dtype is torch.bool else last + 1)
    assert layouts.differs(ids, layout)


def test_an_expert_named_twice() -> None:
    ids = routing(9, 3, 8)
    assert not layouts.repeats(ids)
    ids[4] = torch.tensor([6, -1, 6])
    assert layouts.repeats(ids)
    assert layouts.differs(ids, layouts.counted_by_torch(ids, 8, RANKS))
    ids[4] = -1
    assert not layouts.repeats(ids)


def test_a_copy_of_ids_is_compared_with_others() -> None:
    ids = routing(9, 3, 8)
    ids[8] = torch.tensor([1, -1, 5])
    copy = layouts.copied_ids(ids)
    assert isinstance(copy, bytes)
    assert layouts.ids_equal(copy, ids)
    fewer = ids.clone()
    fewer[8, 2] = -1
    assert not layouts.ids_equal(copy, fewer)
    assert not layouts.names_others(copy, fewer)  # an entry that is left out names no other expert
    fewer[8, 2] = 6
    assert layouts.names_others(copy, fewer)
    ids[4, 2] = ids[4, 0] = 6
    assert layouts.copied_ids(ids) is None
    assert layouts.copied_ids(ids[:0]) == b""


@pytest.mark.parametrize("count", [layouts.local_ids, layouts.local_ids_by_torch])
def test_ids_become_wide_and_are_counted(count: Any) -> None:
    ids = torch.tensor([[0, -1], [2, 0], [-1, 0], [0, -1], [-1, 0]], dtype=torch.int32)
    plan = torch.cat([torch.tensor([7, 7]), ids.flatten(), torch.tensor([1])]).int()
    wide, counts = count(plan, 2, 5, 2, 3, 4)
    assert torch.equal(wide, ids.long())
    assert counts == [8, 0, 4]


@pytest.mark.parametrize("tokens", [[5, 16], [16, 16]], ids=str)
def test_rows_at_fixed_places_are_described(tokens: list[int]) -> None:
    job = make_job(2, tokens, 128, 3, 8)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        _, _, handle, _, _ = buffer.low_latency_dispatch(job.x[rank], job.topk_idx[rank], 16, 8, use_fp8=False)
        sources, ranges = torch.zeros_like(handle[0]), torch.zeros_like(handle[1])
        layouts.described_by_torch(handle.buffer, handle.plan, sources, ranges)
        assert torch.equal(ranges, handle[1])
        for expert in range(4):
            number = len(expert_rows(job, rank, expert))
            assert torch.equal(sources[expert, :number], handle[0][expert, :number])

    on_ranks(job, work)


def test_weights_that_return_are_added_in_rank_order() -> None:
    in_rank = torch.rand(9, RANKS) < 0.5
    offs = in_rank.sum(0).cumsum(0).int()
    places = home.places_at_home(torch.where(in_rank, torch.arange(RANKS), -1))
    rows = torch.randn(40, 8)
    handle = Handle(offs=offs, recv_plan=offs, send_plan=offs, tag=0)
    received: Any = SimpleNamespace(x=rows, handle=handle)
    assert torch.equal(home.add_weights(received, in_rank.T.contiguous().T, 6), home.add_in_order(rows, places)[:, :6])


@pytest.mark.parametrize("beyond", [0, 3])
def test_sources_of_received_rows(beyond: int) -> None:
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert home.source_ranks(offs, 5 + beyond).tolist() == [[0], [0], [2], [2], [2]] + beyond * [[-1]]
    assert home.source_ranks(offs, 1).tolist() == [[0]]
