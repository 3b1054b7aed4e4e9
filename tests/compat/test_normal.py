"""deep_ep's normal mode against the oracle: rows, ids, weights, counts, cached handles, worst cases, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.oracle import Job, make_job, received, visits
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap

SIZES = (1, 2, 4)
TOKENS = [37, 0, 64, 5]
BYTES = int(2e9)


def on_ranks(job: Job, work: Callable[[deep_ep.Buffer, int], Any]) -> list[Any]:
    """Run work(buffer, rank) on a thread for each rank of the job."""

    def rank(group: ThreadGroup) -> Any:
        buffer = deep_ep.Buffer(
            group, BYTES, BYTES, low_latency_mode=True, explicitly_destroy=True, timeout_s=CASE_TIMEOUT_S
        )
        result = work(buffer, group.rank)
        buffer.destroy()
        return result

    return ThreadGroup.run(rank, job.num_ranks, timeout_s=CASE_TIMEOUT_S)


def layout_arguments(buffer: deep_ep.Buffer, job: Job, rank: int) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(job.topk_idx[rank], job.num_experts)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}


def dispatch(buffer: deep_ep.Buffer, job: Job, rank: int, x: Any = None, topk: bool = True, **options: Any) -> Any:
    arguments = layout_arguments(buffer, job, rank)
    if topk:
        arguments |= {"topk_idx": job.topk_idx[rank], "topk_weights": job.topk_weights[rank]}
    return buffer.dispatch(job.x[rank] if x is None else x, **arguments, **options)


@pytest.fixture(params=SIZES, ids=lambda size: f"R{size}")
def job(request: pytest.FixtureRequest) -> Job:
    return make_job(request.param, TOKENS, 64, 3, 8)


def test_the_layout_counts_tokens_and_entries(job: Job) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        per_rank, nodes, per_expert, in_rank, _ = buffer.get_dispatch_layout(job.topk_idx[rank], job.num_experts)
        assert nodes is None
        assert torch.equal(in_rank, visits(job, rank))
        assert per_rank.tolist() == visits(job, rank).sum(0).tolist()
        assert per_expert.tolist() == [int((job.topk_idx[rank] == e).sum()) for e in range(job.num_experts)]
        assert (per_rank.dtype, per_expert.dtype, in_rank.dtype) == (torch.int32, torch.int32, torch.bool)

    on_ranks(job, work)


@pytest.mark.parametrize("alignment", [1, 16])
def test_dispatch_returns_rows_ids_weights_and_counts(job: Job, alignment: int) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, ids, weights, counts, handle, _ = dispatch(buffer, job, rank, expert_alignment=alignment)
        rows, right_ids, right_weights, right_counts, sources = received(job, rank)
        assert torch.equal(recv_x, rows)
        assert recv_x.is_contiguous()
        assert ids.dtype is torch.int64
        assert torch.equal(ids, right_ids)
        assert torch.equal(weights, right_weights)
        assert counts == [-(-count // alignment) * alignment for count in right_counts]
        prefix, _, _, source_tokens, in_rank, _ = handle
        assert prefix[:, rank].tolist() == torch.tensor(sources).cumsum(0).tolist()
        came = [visits(job, source)[:, rank].nonzero().flatten() for source in range(job.num_ranks)]
        assert torch.equal(source_tokens, torch.cat(came).int())
        assert torch.equal(in_rank, visits(job, rank))

    on_ranks(job, work)


def test_dispatch_without_experts_returns_the_same_rows_and_counts(job: Job) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, ids, weights, counts, handle, _ = dispatch(buffer, job, rank, topk=False)
        rows, _, _, right_counts, _ = received(job, rank)
        assert torch.equal(recv_x, rows)
        assert (ids, weights, counts) == (None, None, right_counts)
        out, none, _ = buffer.combine(recv_x, handle)
        assert none is None
        assert torch.equal(out, added(job, rank, lambda source, token, at: job.x[source][token]))

    on_ranks(job, work)


def test_inference_mode_returns_the_same_rows(job: Job) -> None:
    """Its tensors count no versions, so a layout is compared at every dispatch."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        with torch.inference_mode():
            recv_x, ids, *_, handle, _ = dispatch(buffer, job, rank)
            out, _, _ = buffer.combine(recv_x, handle)
        rows, right_ids, *_ = received(job, rank)
        assert torch.equal(recv_x, rows)
        assert torch.equal(ids, right_ids)
        assert torch.equal(out, added(job, rank, lambda source, token, at: job.x[source][token]))

    on_ranks(job, work)


def added(job: Job, rank: int, value: Callable[[int, int, int], torch.Tensor]) -> torch.Tensor:
    """Sum value(source rank, token, visited rank) over the ranks that each token visits, in fp32, rounded once."""
    rows = []
    for token, ranks in enumerate(visits(job, rank)):
        total = torch.zeros(job.x[rank].shape[1])
        for at in ranks.nonzero().flatten().tolist():
            total += value(rank, token, at).float()
        rows.append(total)
    return torch.stack(rows).bfloat16() if rows else torch.zeros(0, job.x[rank].shape[1]).bfloat16()


def test_combine_adds_rows_and_weights(job: Job) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, weights, _, handle, _ = dispatch(buffer, job, rank)
        scale = 1 + rank / 4  # exact in bfloat16, so that each rank's part differs
        out, home, _ = buffer.combine((recv_x.float() * scale).bfloat16(), handle, topk_weights=weights)
        assert torch.equal(
            out, added(job, rank, lambda source, token, at: (job.x[source][token].float() * (1 + at / 4)).bfloat16())
        )
        assert home.dtype is torch.float32
        assert torch.equal(home, job.topk_weights[rank].masked_fill(job.topk_idx[rank] < 0, 0.0))
        again, _, _ = buffer.combine((recv_x.float() * scale).bfloat16(), handle)
        assert torch.equal(again, out)

    on_ranks(job, work)


@pytest.mark.parametrize("number", [1, 2])
def test_biases_are_added_before_the_sum_is_rounded(job: Job, number: int) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, _, _, handle, _ = dispatch(buffer, job, rank)
        bias = tuple(torch.full_like(job.x[rank], 2.0**-8 * (1 + i)) for i in range(number))
        out, _, _ = buffer.combine(recv_x, handle, bias=bias if number == 2 else bias[0])
        copies = visits(job, rank).sum(1, keepdim=True)
        exact = job.x[rank].float() * copies + sum(b.float() for b in bias)
        assert torch.equal(out, exact.bfloat16())

    on_ranks(job, work)


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.int32])
def test_fp8_rows_arrive_with_their_own_scales(job: Job, scales_dtype: torch.dtype) -> None:
    def coded(source: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.arange(len(job.x[source]) * 3).view(-1, 3) + 1000 * source
        return job.x[source].to(torch.float8_e4m3fn), number.to(scales_dtype)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        codes, scales = coded(rank)
        (recv_codes, recv_scales), *_, handle, _ = dispatch(buffer, job, rank, (codes, scales.T.contiguous().T))
        came = [visits(job, source)[:, rank] for source in range(job.num_ranks)]
        right = [coded(source) for source in range(job.num_ranks)]
        every = torch.cat([c[0].view(torch.uint8)[here] for c, here in zip(right, came, strict=True)])
        assert torch.equal(recv_codes.view(torch.uint8), every)
        assert torch.equal(recv_scales, torch.cat([c[1][here] for c, here in zip(right, came, strict=True)]))
        (again, _), *none, _ = buffer.dispatch((codes, scales), handle=handle)
        assert torch.equal(again.view(torch.uint8), every)
        assert none == [None] * 4

    on_ranks(job, work)


def test_a_cached_handle_repeats_the_routing_for_other_rows(job: Job) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        _, _, _, _, handle, _ = dispatch(buffer, job, rank)
        for factor in (2, 1):
            wide = torch.cat([job.x[rank] * factor] * factor, 1)
            recv_x, *none, _ = buffer.dispatch(wide, handle=handle)
            assert none == [None] * 4
            assert torch.equal(recv_x, torch.cat([received(job, rank)[0] * factor] * factor, 1))
            out, _, _ = buffer.combine(recv_x, handle)
            assert torch.equal(out, (wide.float() * visits(job, rank).sum(1, keepdim=True)).bfloat16())

    on_ranks(job, work)


@pytest.mark.parametrize("extra", [0, 1, 500])
def test_worst_case_rows_are_followed_by_ids_of_minus_one(job: Job, extra: int) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        worst = sum(len(x) for x in job.x) + extra
        recv_x, ids, weights, counts, handle, _ = dispatch(buffer, job, rank, num_worst_tokens=worst)
        rows, right_ids, right_weights, _, _ = received(job, rank)
        assert (len(recv_x), len(ids), len(weights), counts) == (worst, worst, worst, [])
        assert torch.equal(recv_x[: len(rows)], rows)
        assert torch.equal(ids[: len(rows)], right_ids)
        assert torch.equal(weights[: len(rows)], right_weights)
        assert (ids[len(rows) :] == -1).all()
        out, home, _ = buffer.combine(recv_x, handle, topk_weights=weights)
        assert torch.equal(out, (job.x[rank].float() * visits(job, rank).sum(1, keepdim=True)).bfloat16())
        assert torch.equal(home, job.topk_weights[rank].masked_fill(job.topk_idx[rank] < 0, 0.0))

    on_ranks(job, work)


def test_ranks_may_have_more_tokens_from_call_to_call() -> None:
    jobs = [make_job(2, tokens, 64, 3, 8, seed=i) for i, tokens in enumerate(([3, 1], [40, 2], [2, 300], [33, 33]))]

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        results = [(job, *dispatch(buffer, job, rank)) for job in jobs]
        for job, recv_x, _, _, _, handle, _ in reversed(results):  # handles outlive the buffer that was outgrown
            assert torch.equal(recv_x, received(job, rank)[0])
            out, _, _ = buffer.combine(recv_x, handle)
            assert torch.equal(out, (job.x[rank].float() * visits(job, rank).sum(1, keepdim=True)).bfloat16())

    on_ranks(jobs[0], work)


def test_an_event_is_kept_unless_it_is_released() -> None:
    """An op's event may be waited for repeatedly; a hook runs in one wait."""
    event, waited = EventOverlap(EventHandle()), []
    event.register_hook_after_wait(lambda: waited.append("once"))
    for _ in range(2):
        event.current_stream_wait()
        with event:
            pass
    assert (event.event is not None, waited) == (True, ["once"])
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None
    again = EventOverlap(EventHandle())
    again.current_stream_wait(release_handle=True)
    assert again.event is None


def test_events_and_hints(job: Job) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        before = buffer.capture()
        recv_x, _, _, _, handle, event = dispatch(buffer, job, rank, previous_event=before, async_finish=True)
        with event:
            pass
        out, _, event = buffer.combine(recv_x, handle, previous_event=event, async_finish=True)
        event.current_stream_wait()
        assert len(out) == len(job.x[rank])

    on_ranks(job, work)
    config = deep_ep.Config(24, 8, 256)
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    assert config.get_nvl_buffer_size_hint(14336, 8) > 12 * 8 * 256 * 14336
    for_rows_of_many_experts = 2 * (2 * 288 * 128 * (14336 + 4 * 56) + 4 * 288) + 128
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) == for_rows_of_many_experts
    for_rows_of_one = 2 * (2 * 4 * (16 + 256) + 128) + 128
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 1) == for_rows_of_one
