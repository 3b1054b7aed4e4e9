"""deep_ep's ElasticBuffer against the oracle: rows, metadata, the expanded layout, sums in the order of topk_idx."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.oracle import Job, make_job, received, visits
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.operands import spelled
from moe_rt.compat.deep_ep.utils.gate import get_unbalanced_scores
from moe_rt.errors import GroupClosed, InvalidInput, MoeRtError, TooManyTokens

MOST, TOKENS, HIDDEN = 64, [37, 0, 64, 5], 64
Work = Callable[[deep_ep.ElasticBuffer, int], Any]


def on_ranks(job: Job, work: Work, **options: Any) -> list[Any]:
    """Run work(buffer, rank) on a thread for each rank of the job."""

    def rank(group: ThreadGroup) -> Any:
        buffer = deep_ep.ElasticBuffer(
            group, num_max_tokens_per_rank=MOST, hidden=2 * HIDDEN, num_cpu_timeout_secs=int(CASE_TIMEOUT_S),
            explicitly_destroy=True, **options,
        )  # fmt: skip
        result = work(buffer, group.rank)
        buffer.destroy()
        return result

    return ThreadGroup.run(rank, job.num_ranks, timeout_s=CASE_TIMEOUT_S)


def dispatch(buffer: deep_ep.ElasticBuffer, job: Job, rank: int, x: Any = None, **options: Any) -> Any:
    return buffer.dispatch(
        job.x[rank] if x is None else x, job.topk_idx[rank], job.topk_weights[rank], num_experts=job.num_experts,
        **options,
    )  # fmt: skip


@pytest.fixture(params=(1, 2, 4), ids=lambda size: f"R{size}")
def job(request: pytest.FixtureRequest) -> Job:
    return make_job(request.param, TOKENS, HIDDEN, 3, 8)


def sources(job: Job, rank: int) -> list[tuple[int, int]]:
    """Return (source, token) of each token that a rank receives, in order."""
    return [(source, int(t)) for source in range(job.num_ranks) for t in visits(job, source)[:, rank].nonzero()]


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@pytest.mark.parametrize("sync", [True, False], ids=["exact", "worst case"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_rows_and_metadata(job: Job, alignment: int, sync: bool) -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        stats = torch.ones(job.num_local, dtype=torch.int32)
        recv_x, ids, weights, handle, _ = dispatch(
            buffer, job, rank, expert_alignment=alignment, do_cpu_sync=sync, cumulative_local_expert_recv_stats=stats
        )
        rows, right_ids, right_weights, counts, from_ranks = received(job, rank)
        n, worst = len(rows), job.num_ranks * MOST
        assert len(recv_x) == len(ids) == len(weights) == handle.num_recv_tokens == (n if sync else worst)
        assert torch.equal(recv_x[:n], rows)
        assert torch.equal(ids[:n], right_ids)
        assert (ids[n:] == -1).all()
        assert torch.equal(weights[:n], right_weights)
        padded = [up(count, alignment) for count in counts]
        assert handle.num_recv_tokens_per_expert_list == (padded if sync else [])
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == torch.tensor(from_ranks).cumsum(0).tolist()
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(padded).cumsum(0).tolist()
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts == (stats - 1).tolist()
        for row, (source, token) in enumerate(sources(job, rank)):
            first = int((right_ids[row] >= 0).int().argmax())
            assert handle.recv_src_metadata[row, :2].tolist() == [source * MOST + token, source * 3 + first]
        slots = handle.dst_buffer_slot_idx
        for token, entries in enumerate(job.topk_idx[rank].tolist()):
            for k, expert in enumerate(entries):
                before = visits(job, rank)[:token, expert // job.num_local].sum() if expert >= 0 else -1
                assert int(slots[token, k]) == int(before)

    on_ranks(job, work)


@pytest.mark.parametrize("sync", [True, False], ids=["exact", "worst case"])
@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_the_expanded_layout(job: Job, alignment: int, codes: bool, sync: bool) -> None:
    def given(source: int) -> Any:
        scales = (torch.arange(len(job.x[source]) * 3).view(-1, 3) + 1000 * source).float()
        return (job.x[source].to(torch.float8_e4m3fn), scales) if codes else job.x[source]

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        options = {"do_expand": True, "do_zero_padding": True, "use_tma_aligned_col_major_sf": True}
        recv_x, ids, weights, handle, _ = dispatch(
            buffer, job, rank, given(rank), expert_alignment=alignment, do_cpu_sync=sync, **options
        )
        assert ids is None
        x, scales = recv_x if codes else (recv_x, None)
        _, right_ids, right_weights, counts, _ = received(job, rank)
        wanted = up(sum(up(c, alignment) for c in counts), 1)
        assert len(x) == len(weights) == handle.num_expanded_tokens
        assert handle.num_expanded_tokens == wanted if sync else handle.num_expanded_tokens >= wanted
        if codes:
            assert scales.stride(0) == 1
            assert scales.stride(1) % 4 == 0
        start, used = 0, torch.zeros(len(x), dtype=torch.bool)
        for expert, count in enumerate(counts):
            pairs = (right_ids == expert).nonzero().tolist()
            for place, (row, k) in enumerate(pairs):
                source, token = sources(job, rank)[row]
                at = start + place
                assert int(handle.recv_src_metadata[row, 2 + k]) == at
                right = given(source)
                assert torch.equal(x[at].float(), (right[0] if codes else right)[token].float())
                if codes:
                    assert torch.equal(scales[at], right[1][token])
                assert weights[at] == right_weights[row, k]
                used[at] = True
            assert int(handle.psum_num_recv_tokens_per_expert[expert]) == start + count
            start += up(count, alignment)
        assert not x[:start].float()[~used[:start]].any()
        assert not weights[:start][~used[:start]].any()
        again, _, none, same, _ = buffer.dispatch(given(rank), handle=handle, **options)
        assert (none, same) == (None, handle)
        for a, b in zip(again, recv_x, strict=True) if codes else [(again, recv_x)]:
            assert torch.equal(a.float(), b.float())
        weights_again = buffer.dispatch(given(rank), None, 2 * job.topk_weights[rank], handle=handle, **options)[2]
        assert torch.equal(weights_again, 2 * weights)

    on_ranks(job, work)


@pytest.mark.parametrize("expand", [False, True], ids=["tokens", "expanded"])
@pytest.mark.parametrize("sync", [True, False], ids=["exact", "worst case"])
def test_tokens_that_visit_no_expert(expand: bool, sync: bool) -> None:
    job = make_job(2, [5, 0], HIDDEN, 3, 4)
    none = torch.full((5, 3), -1)

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        ids, options = none[: len(job.x[rank])], {"do_expand": expand, "do_cpu_sync": sync, "num_experts": 4}
        recv_x, recv_ids, weights, handle, _ = buffer.dispatch(job.x[rank], ids, job.topk_weights[rank], **options)
        rows = 0 if sync else 2 * MOST * (2 if expand else 1)
        assert recv_x.shape == (rows, HIDDEN)
        assert len(weights) == rows
        assert recv_ids is None or (recv_ids.shape == (rows, 3) and (recv_ids == -1).all())
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [0, 0]
        assert handle.recv_src_metadata.shape == (0 if sync else 2 * MOST, 5)
        assert (handle.dst_buffer_slot_idx == -1).all()
        bias = torch.ones_like(job.x[rank])
        out, home, _ = buffer.combine(torch.full_like(recv_x, torch.nan), handle, topk_weights=weights, bias=bias)
        assert torch.equal(out, bias)
        assert not home.any()

    on_ranks(job, work)


def outputs(job: Job, source: int) -> torch.Tensor:
    """Return bfloat16 [T, K, H]: what the expert of each entry makes of the token; 0 for no expert."""
    factors = (1 + job.topk_idx[source].float()) / 7
    y = (job.x[source].float().unsqueeze(1) * factors.unsqueeze(2)).bfloat16()
    return y.masked_fill((job.topk_idx[source] < 0).unsqueeze(2), 0)


def added(job: Job, source: int, bias: tuple[torch.Tensor, ...], on_each_rank: bool) -> torch.Tensor:
    """Return the contract's sum: the bias, then the entries in order, or each rank's rounded sum at its last entry."""
    rows = []
    for token, (entries, y) in enumerate(zip(job.topk_idx[source].tolist(), outputs(job, source), strict=True)):
        total = torch.zeros(y.shape[1])
        for part in bias:
            total += part[token].float()
        sums: dict[int, torch.Tensor] = {}
        for k, expert in enumerate(entries):
            if expert < 0:
                continue
            rank = expert // job.num_local
            if not on_each_rank:
                total += y[k].float()
                continue
            sums[rank] = sums.get(rank, torch.zeros(y.shape[1])) + y[k].float()
            if not any(e // job.num_local == rank for e in entries[k + 1 :] if e >= 0):
                total += sums[rank].bfloat16().float()
        rows.append(total.bfloat16())
    return torch.stack(rows) if rows else torch.zeros(0, job.x[source].shape[1]).bfloat16()


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("several", [True, False], ids=["sums on each rank", "one sum"])
@pytest.mark.parametrize("expand", [False, True], ids=["tokens", "expanded"])
@pytest.mark.parametrize("sync", [True, False], ids=["exact", "worst case"])
def test_combine_adds_in_the_order_of_topk_idx(job: Job, expand: bool, several: bool, number: int, sync: bool) -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        recv_x, _, weights, handle, _ = dispatch(buffer, job, rank, do_expand=expand, do_cpu_sync=sync)
        y = torch.full_like(recv_x, torch.nan)
        slots = handle.recv_src_metadata[:, 2:]
        _, ids, _, _, _ = received(job, rank)
        for row, (source, token) in enumerate(sources(job, rank)):
            local = outputs(job, source)[token]
            total = torch.zeros(HIDDEN)
            for k in (ids[row] >= 0).nonzero().flatten().tolist():
                total += local[k].float()
                if expand:
                    y[int(slots[row, k])] = local[k]
            if not expand:
                y[row] = total.bfloat16()
        bias = tuple(torch.randn(job.x[rank].shape).bfloat16() for _ in range(number))
        given: Any = bias if number == 2 else bias[0] if bias else None
        sent = None if expand and not several else 3 * weights
        out, home, _ = buffer.combine(y, handle, topk_weights=sent, bias=given)
        assert torch.equal(out, added(job, rank, bias, several or not expand))
        if sent is None:
            assert home is None
        else:
            assert torch.equal(home, 3 * job.topk_weights[rank].masked_fill(job.topk_idx[rank] < 0, 0.0))

    on_ranks(job, work, allow_multiple_reduction=several)


@pytest.mark.parametrize("expand", [False, True], ids=["tokens", "expanded"])
@pytest.mark.parametrize("several", [True, False], ids=["sums on each rank", "one sum"])
def test_the_order_of_a_sum_is_seen(expand: bool, several: bool) -> None:
    """1 vanishes in 2^30 unless 2^30 was cancelled before."""
    big = 2.0**30
    parts = {0: 1.0, 1: big, 2: -big}  # of each rank
    ids = torch.tensor([[1, 2, 0], [0, 1, 2], [2, 0, 1]])
    job = Job([torch.ones(3, HIDDEN).bfloat16()] * 3, [ids] * 3, [torch.ones(3, 3)] * 3, 3)

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        recv_x, _, _, handle, _ = dispatch(buffer, job, rank, do_expand=expand)
        y = torch.full_like(recv_x, parts[rank])
        assert buffer.combine(y, handle)[0][:, 0].tolist() == [1.0, 0.0, 0.0]
        ones = torch.ones(3, HIDDEN).bfloat16()
        assert buffer.combine(y, handle, bias=ones)[0][:, 0].tolist() == [1.0, 0.0, 0.0]

    on_ranks(job, work, allow_multiple_reduction=several)


def test_a_barrier_and_hints() -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        buffer.barrier()
        assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 2)
        assert buffer.get_theoretical_num_sms(8, 3) % 2 == 0
        assert buffer.get_theoretical_num_qps(20) == 129
        event = buffer.capture()
        recv_x, _, _, handle, done = dispatch(
            buffer, job, rank, previous_event=event, allocate_on_comm_stream=True, async_with_compute_stream=True
        )
        done.current_stream_wait()
        with buffer.combine(recv_x, handle, async_with_compute_stream=True)[-1]:
            pass
        assert buffer.num_bytes == deep_ep.ElasticBuffer.get_buffer_size_hint(buffer.group, MOST, 2 * HIDDEN)

    job = make_job(2, TOKENS, HIDDEN, 3, 8)
    on_ranks(job, work)
    group = ThreadGroup.make(8)[0]
    assert deep_ep.ElasticBuffer.get_buffer_size_hint(group, 4096, 7168, 8) == 8 * 4096 * (14336 + 128)
    pair, sizes = ThreadGroup.make(2)[0], (4096, 7168, 8)
    every_entry = deep_ep.ElasticBuffer.get_buffer_size_hint(pair, *sizes, allow_multiple_reduction=False)
    assert every_entry == 8 * 4096 * 14336 + (2 << 20)


WRONG = 1  # the rank that calls wrongly
PAIR = make_job(2, [20, 20], HIDDEN, 3, 4)
DISPATCHES: dict[str, tuple[dict[str, Any], str, type[MoeRtError]]] = {
    "float32 rows": ({"x": torch.zeros(20, HIDDEN)}, "x: got", InvalidInput),
    "fewer ids": ({"topk_idx": PAIR.topk_idx[1][:3]}, "topk_idx: got", InvalidInput),
    "ids of one dimension": (
        {"topk_idx": PAIR.topk_idx[1][:, 0]}, "expected contiguous torch.int64 [20, K] on cpu", InvalidInput,
    ),
    "int32 ids": ({"topk_idx": PAIR.topk_idx[1].int()}, "topk_idx: got", InvalidInput),
    "double weights": ({"topk_weights": PAIR.topk_weights[1].double()}, "topk_weights: got", InvalidInput),
    "an expert twice": ({"topk_idx": torch.zeros(20, 3, dtype=torch.int64)}, "expert twice", MoeRtError),
    "odd experts": ({"num_experts": 5}, "num_experts: got 5", InvalidInput),
    "more tokens than agreed": ({"num_max_tokens_per_rank": 8}, "20 tokens", TooManyTokens),
    "more codes than agreed": (
        {"x": (PAIR.x[1].to(torch.float8_e4m3fn), torch.ones(20, 3)), "num_max_tokens_per_rank": 8},
        "20 tokens", TooManyTokens,
    ),
    "padding without expansion": ({"do_zero_padding": True}, "do_zero_padding: got", InvalidInput),
    "statistics of another size": (
        {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)}, "recv_stats: got", InvalidInput,
    ),
    "an event alone": ({"previous_event": object()}, "previous_event: got", InvalidInput),
    "another buffer's handle": ({"handle": (1, 2)}, "handle: got", InvalidInput),
    "larger than the buffer": ({"num_max_tokens_per_rank": 1 << 20}, "num_bytes: got", InvalidInput),
}  # fmt: skip


def raised(work: Work) -> list[MoeRtError]:
    """Run work, which must raise on every rank and leave the buffer usable, and return the errors."""

    def rank(buffer: deep_ep.ElasticBuffer, number: int) -> MoeRtError:
        with pytest.raises(MoeRtError) as caught:
            work(buffer, number)
        recv_x, _, weights, handle, _ = dispatch(buffer, PAIR, number)
        buffer.combine(recv_x, handle, topk_weights=weights)
        return caught.value

    return on_ranks(PAIR, rank)


@pytest.mark.parametrize("later", [False, True], ids=["first op", "later op"])
@pytest.mark.parametrize("case", DISPATCHES)
def test_wrong_operands_of_dispatch(case: str, later: bool) -> None:
    changed, text, kind = DISPATCHES[case]

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        if later:
            recv_x, _, weights, handle, _ = dispatch(buffer, PAIR, rank)
            buffer.combine(recv_x, handle, topk_weights=weights)
        arguments = {"x": PAIR.x[rank], "topk_idx": PAIR.topk_idx[rank], "topk_weights": PAIR.topk_weights[rank]}
        buffer.dispatch(**(arguments | {"num_experts": 4} | (changed if rank == WRONG else {})))

    errors = raised(work)
    assert isinstance(errors[WRONG], kind)
    assert text in str(errors[WRONG])
    assert isinstance(errors[0], InvalidInput | TooManyTokens)
    assert f"rank {WRONG}" in str(errors[0])
    assert kind is not TooManyTokens or "got 20 tokens" in str(errors[0])


@pytest.mark.parametrize("what", ["x", "handle", "topk_weights", "bias", "one of two biases"])
def test_wrong_operands_of_combine(what: str) -> None:
    given: list[str] = []
    name = "bias" if "bias" in what else what

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        recv_x, _, weights, handle, _ = dispatch(buffer, PAIR, rank)
        wrong = {"x": recv_x.float(), "handle": tuple(recv_x), "topk_weights": weights[1:], "bias": recv_x[:1]}
        arguments = {"x": recv_x, "handle": handle, "topk_weights": weights, "bias": PAIR.x[rank]}
        given.extend([spelled(wrong[name])] if rank == WRONG else ())
        changed = (PAIR.x[rank], wrong["bias"]) if name != what else wrong[name]
        buffer.combine(**(arguments | ({name: changed} if rank == WRONG else {})))

    errors = raised(work)
    assert re.search(rf"{name}: got .*{re.escape(given[0])}, expected", str(errors[WRONG]))
    assert f"rank {WRONG}" in str(errors[0])


def test_weights_need_sums_on_each_rank() -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        recv_x, _, weights, handle, _ = dispatch(buffer, PAIR, rank, do_expand=True)
        with pytest.raises(InvalidInput, match="allow_multiple_reduction"):
            buffer.combine(recv_x, handle, topk_weights=weights)

    on_ranks(PAIR, work, allow_multiple_reduction=False)


def test_a_destroyed_buffer() -> None:
    buffer = deep_ep.ElasticBuffer(ThreadGroup.make(1)[0], num_bytes=1 << 21, explicitly_destroy=True)
    buffer.destroy()
    for op in (buffer.barrier, lambda: buffer.dispatch(torch.zeros(1, 8).bfloat16())):
        with pytest.raises(GroupClosed):
            op()
    with pytest.raises(InvalidInput, match="explicitly_destroy"):
        deep_ep.ElasticBuffer(ThreadGroup.make(1)[0], num_bytes=1 << 21).destroy()


@pytest.mark.parametrize("precise", [False, True])
def test_scores_send_more_to_the_first_rank(precise: bool) -> None:
    torch.manual_seed(0)
    for num_ranks, num_topk, ratio in ((4, 4, 2.0), (8, 2, 3.0), (4, 1, 1.0)):
        ids = get_unbalanced_scores(2048, 4 * num_ranks, num_ranks, num_topk, ratio, precise).topk(num_topk).indices
        counts = torch.stack([(ids // 4 == rank).any(1).sum() for rank in range(num_ranks)]).float()
        assert abs(counts[0] / counts[1:].mean() - ratio) < 0.2 * ratio
        if precise:
            assert counts[1:].max() <= counts[1:].min() + 1
