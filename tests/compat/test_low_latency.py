"""deep_ep's low-latency mode against the oracle: packed rows, scales, counts, hooks, weights applied at the source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.oracle import Job, expert_rows, make_job, weighted
from compat.test_normal import on_ranks
from support.ranks import CASE_TIMEOUT_S

from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.utils.math import per_token_cast_back

MOST = 16
MASK = (1 << 32) - 1


@pytest.fixture(params=(1, 2, 4), ids=lambda size: f"R{size}")
def job(request: pytest.FixtureRequest) -> Job:
    return make_job(request.param, [16, 0, 9, 3], 512, 3, 8)


def dispatch(buffer: deep_ep.Buffer, job: Job, rank: int, **options: Any) -> Any:
    return buffer.low_latency_dispatch(job.x[rank], job.topk_idx[rank], MOST, job.num_experts, **options)


def check_packing(job: Job, rank: int, count: torch.Tensor, handle: Any) -> None:
    src_info, layout_range, most, hidden, num_experts = handle
    assert (most, hidden, num_experts) == (MOST, job.x[rank].shape[1], job.num_experts)
    for expert in range(job.num_local):
        rows = expert_rows(job, rank, expert)
        assert int(count[expert]) == len(rows)
        assert src_info[expert, : len(rows)].tolist() == [token for _, token in rows]
        for source in range(job.num_ranks):
            begin, number = int(layout_range[expert, source]) >> 32, int(layout_range[expert, source]) & MASK
            assert [token for s, token in rows if s == source] == src_info[expert, begin : begin + number].tolist()


@pytest.mark.parametrize("hook", [False, True], ids=["at once", "hook"])
def test_bfloat16_rows_are_packed_by_expert(job: Job, hook: bool) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        stats = torch.ones(job.num_local, dtype=torch.int32)
        waits = torch.zeros(job.num_ranks, dtype=torch.int64)
        recv_x, count, handle, _, receive = dispatch(
            buffer, job, rank, use_fp8=False, return_recv_hook=hook, cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=waits,
        )  # fmt: skip
        if hook:
            assert (count == -1).all()  # nothing has arrived before the hook
            before = handle[0], handle[1]
            receive()
            assert before[0] is handle[0]  # the hook has written what was read before
            assert before[1] is handle[1]
        assert recv_x.shape == (job.num_local, job.num_ranks * MOST, 512)
        assert torch.equal(stats, count + 1)
        assert (waits >= 0).all()
        check_packing(job, rank, count, handle)
        for expert in range(job.num_local):
            for row, (source, token) in enumerate(expert_rows(job, rank, expert)):
                assert torch.equal(recv_x[expert, row], job.x[source][token])

    on_ranks(job, work)


@pytest.mark.parametrize("scales", ["float32", "powers of two", "ue8m0"])
def test_fp8_rows_have_their_own_scales(job: Job, scales: str) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        (codes, given), count, handle, _, _ = dispatch(
            buffer, job, rank, round_scale=scales != "float32", use_ue8m0=scales == "ue8m0"
        )
        check_packing(job, rank, count, handle)
        ints = scales == "ue8m0"
        assert given.dtype is (torch.int32 if ints else torch.float32)
        assert given.shape == (job.num_local, job.num_ranks * MOST, 1 if ints else 4)
        assert given.stride(1) == 1
        for expert in range(job.num_local):
            rows = expert_rows(job, rank, expert)
            if not rows:
                continue
            sent = torch.stack([job.x[source][token] for source, token in rows]).float()
            back = per_token_cast_back(codes[expert, : len(rows)], given[expert, : len(rows)]).float()
            amax = sent.view(len(rows), 4, 128).abs().amax(2)
            exponents = (amax / 448).log2().ceil()
            if scales == "float32":
                assert torch.allclose(given[expert, : len(rows)], amax / 448, rtol=1e-6)
            elif ints:
                found = given[expert, : len(rows)].clone(memory_format=torch.contiguous_format).view(torch.uint8)
                assert torch.equal(found.float() - 127, exponents)
            else:
                assert torch.equal(given[expert, : len(rows)], exponents.exp2())
            assert ((back - sent).view(len(rows), 4, 128).abs() <= 2**-4 * amax.unsqueeze(2)).all()
            assert torch.allclose(back, sent, rtol=2**-3, atol=1e-2)

    on_ranks(job, work)


@pytest.mark.parametrize("hook", [False, True], ids=["at once", "hook"])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_combine_weights_each_row_where_its_token_is(job: Job, hook: bool, zero_copy: bool) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = dispatch(buffer, job, rank, use_fp8=False)
        first = rank * job.num_local
        y = torch.stack([(row.float() * (1 + first + e)).bfloat16() for e, row in enumerate(recv_x)])
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:] = y
            y = torch.empty_like(y)
        given = torch.full_like(job.x[rank], 7.0)
        out, _, receive = buffer.low_latency_combine(
            y, job.topk_idx[rank], job.topk_weights[rank], handle, zero_copy=zero_copy, return_recv_hook=hook, out=given
        )
        if hook:
            assert (given == 7.0).all()
            receive()
        outputs = {e: (job.x[rank].float() * (1 + e)).bfloat16() for e in range(job.num_experts)}
        assert out is given
        assert torch.allclose(out.float(), weighted(job, rank, outputs), rtol=2**-8, atol=1e-6)

    on_ranks(job, work)


def test_an_entry_may_be_left_out_of_combine() -> None:
    job = make_job(2, [8, 8], 128, 3, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = dispatch(buffer, job, rank, use_fp8=False)
        fewer = job.topk_idx[rank].clone()
        fewer[:, 2] = -1
        for expert in range(2):  # rows that are left out are not added, not even times zero
            for row, (source, token) in enumerate(expert_rows(job, rank, expert)):
                if int(job.topk_idx[source][token, 2]) == 2 * rank + expert:
                    recv_x[expert, row] = torch.nan
        out, _, _ = buffer.low_latency_combine(recv_x, fewer, job.topk_weights[rank], handle)
        total = job.topk_weights[rank].masked_fill(fewer < 0, 0).sum(1, keepdim=True)
        assert torch.allclose(out.float(), job.x[rank].float() * total, rtol=2**-7, atol=1e-6)

    on_ranks(job, work)


def test_rows_and_weights_that_torch_negates_at_reading() -> None:
    job = make_job(2, [8, 8], 128, 3, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = dispatch(buffer, job, rank, use_fp8=False)
        weights = job.topk_weights[rank]
        right, _, _ = buffer.low_latency_combine(recv_x, job.topk_idx[rank], weights, handle)
        negated = torch._neg_view(-recv_x), torch._neg_view(-weights)
        for hook in (False, True):
            out, _, receive = buffer.low_latency_combine(
                negated[0], job.topk_idx[rank], negated[1], handle, return_recv_hook=hook
            )
            if hook:
                receive()
            assert torch.equal(out, right)

    on_ranks(job, work)


def test_a_hook_is_the_second_half() -> None:
    """An op with a hook returns before a peer calls it, and the caller may then write its inputs."""
    job = make_job(2, [8, 8], 128, 3, 4)
    begun = [threading.Event(), threading.Event()]

    def begin(op: int, rank: int, call: Callable[[], Any]) -> Any:
        if rank == 1:
            assert begun[op].wait(CASE_TIMEOUT_S)
        result = call()
        begun[op].set()
        return result

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        dispatch(buffer, job, rank, use_fp8=False)  # makes memory, which is collective
        x = job.x[rank].clone()
        options = {"use_fp8": False, "return_recv_hook": True}
        arguments = x, job.topk_idx[rank], MOST, job.num_experts
        recv_x, count, handle, _, hook = begin(0, rank, lambda: buffer.low_latency_dispatch(*arguments, **options))
        x.fill_(7.0)
        hook()
        check_packing(job, rank, count, handle)
        for expert in range(job.num_local):
            for row, (source, token) in enumerate(expert_rows(job, rank, expert)):
                assert torch.equal(recv_x[expert, row], job.x[source][token])
        weights = job.topk_weights[rank].clone()
        last = recv_x, job.topk_idx[rank], weights, handle
        out, _, hook = begin(1, rank, lambda: buffer.low_latency_combine(*last, return_recv_hook=True))
        recv_x.fill_(7.0), weights.fill_(7.0)
        hook()
        outputs = dict.fromkeys(range(job.num_experts), job.x[rank])
        assert torch.allclose(out.float(), weighted(job, rank, outputs), rtol=2**-8, atol=1e-6)

    on_ranks(job, work)


def test_two_ops_may_be_outstanding() -> None:
    job = make_job(2, [8, 8], 128, 3, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        first = dispatch(buffer, job, rank, use_fp8=False, return_recv_hook=True)
        second = dispatch(buffer, job, rank, use_fp8=False, return_recv_hook=True)
        second[-1]()
        first[-1]()
        for _, count, handle, _, _ in (first, second):
            check_packing(job, rank, count, handle)

    on_ranks(job, work)


def test_another_default_dtype() -> None:
    """DeepEP's own tests make bfloat16 the default."""
    job = make_job(2, [8, 8], 128, 3, 4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        on_ranks(job, lambda buffer, rank: check_packing(job, rank, *dispatch(buffer, job, rank, use_fp8=False)[1:3]))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_hook_outside_of_inference_mode() -> None:
    job = make_job(2, [8, 8], 512, 3, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        stats = torch.zeros(job.num_local, dtype=torch.int32)
        with torch.inference_mode():
            options = {"return_recv_hook": True, "cumulative_local_expert_recv_stats": stats}
            _, count, handle, _, receive = dispatch(buffer, job, rank, **options)
        receive()
        check_packing(job, rank, count, handle)
        assert torch.equal(stats, count)

    on_ranks(job, work)


def test_bits_are_the_same_in_every_run() -> None:
    job = make_job(2, [16, 16], 512, 3, 8)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        runs = []
        for _ in range(3):
            recv_x, _, handle, _, _ = dispatch(buffer, job, rank, use_fp8=False)
            runs.append(buffer.low_latency_combine(recv_x, job.topk_idx[rank], job.topk_weights[rank], handle)[0])
        assert all(torch.equal(run, runs[0]) for run in runs)

    on_ranks(job, work)
