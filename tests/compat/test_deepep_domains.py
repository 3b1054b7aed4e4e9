"""deep_ep's normal mode over several domains of 8 ranks, its handles' items, and buffers that grow or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.oracle import Job, make_job, received, visits
from compat.test_normal import BYTES, dispatch, layout_arguments, on_ranks
from compat.texts import said, zeros
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep import home
from moe_rt.compat.deep_ep.exchange import Exchange, Rows
from moe_rt.compat.deep_ep.normal import biases, first_rows
from moe_rt.errors import ConfigMismatch, InvalidInput, MoeRtError, TooManyTokens

BF16 = torch.bfloat16


def source_tokens(job: Job, rank: int) -> list[int]:
    return [int(t) for source in range(job.num_ranks) for t in visits(job, source)[:, rank].nonzero()]


def test_sixteen_ranks() -> None:
    """Handles have DeepEP's ten items of ranks in two domains, and counts of domains are compared with the routing."""
    job = make_job(16, [3, 0, 2, 1] * 4, 16, 2, 16)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        arguments = layout_arguments(buffer, job, rank)
        domains = buffer.get_dispatch_layout(job.topk_idx[rank], 16)[1]
        halves = visits(job, rank).view(-1, 2, 8).any(2).sum(0)
        assert (domains.dtype, domains.tolist()) == (torch.int32, halves.tolist())
        arguments |= {"x": job.x[rank], "topk_idx": job.topk_idx[rank], "topk_weights": job.topk_weights[rank]}
        for wrong in (domains + 1, domains[:1], [1, 2]):
            got = f"torch.int32 {list(wrong.shape)}" if isinstance(wrong, torch.Tensor) else "list"
            text = f"rank {rank}: num_tokens_per_rdma_rank: got {got}, expected {halves.tolist()}"
            assert said(lambda wrong=wrong: buffer.dispatch(**arguments, num_tokens_per_rdma_rank=wrong)) == text
        for given in (domains, domains.long(), None):
            recv_x, ids, weights, counts, handle, event = buffer.internode_dispatch(
                **arguments, num_tokens_per_rdma_rank=given, expert_alignment=2, async_finish=True
            )
        rows, right_ids, right_weights, right_counts, sources = received(job, rank)
        assert event.event is not None
        assert torch.equal(recv_x, rows)
        assert torch.equal(ids, right_ids)
        assert torch.equal(weights, right_weights)
        assert counts == [-(-count // 2) * 2 for count in right_counts]
        assert len(handle) == 10
        ends = torch.tensor(sources).cumsum(0).tolist()
        in_rank, _, _, _, of_domains, _, of_ranks, tokens, *_ = handle
        assert torch.equal(in_rank, visits(job, rank))
        assert of_domains.tolist() == [ends[7], ends[15]]
        assert of_ranks.tolist() == ends
        assert tokens.tolist() == source_tokens(job, rank)
        assert [handle[place].numel() for place in (1, 2, 3, 5, 8, 9)] == [0] * 6
        copies = visits(job, rank).sum(1, keepdim=True)
        for bias in (None, torch.ones_like(job.x[rank])):
            out, _, _ = buffer.internode_combine(recv_x, handle, bias=bias)
            assert torch.equal(out, (job.x[rank].float() * copies + (0 if bias is None else 1)).bfloat16())
        elastic = deep_ep.ElasticBuffer(
            buffer.group, num_max_tokens_per_rank=4, hidden=16, num_cpu_timeout_secs=int(CASE_TIMEOUT_S)
        )
        recv_x, _, weights, ep, _ = elastic.dispatch(job.x[rank], job.topk_idx[rank], weights_of(rank), num_experts=16)
        out, home, _ = elastic.combine(recv_x, ep, topk_weights=weights)
        assert torch.equal(out, (job.x[rank].float() * copies).bfloat16())
        assert torch.equal(home, weights_of(rank).masked_fill(job.topk_idx[rank] < 0, 0))

    def weights_of(rank: int) -> torch.Tensor:
        return job.topk_weights[rank]

    on_ranks(job, work)


@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (1, 2), (1, 8), (3, 4), (40, 2)], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 8, 64])
def test_rows_arrive_at_home_by_rank_then_token(shape: tuple[int, int], num_ranks: int) -> None:
    """Also if there are more ranks than entries."""
    ranks = torch.randint(-1, num_ranks, shape)
    entries = [(rank, token, k) for token, row in enumerate(ranks.tolist()) for k, rank in enumerate(row) if rank >= 0]
    right = torch.full(shape, -1)
    for place, (_, token, k) in enumerate(sorted(entries)):
        right[token, k] = place
    assert home.places_at_home(ranks).tolist() == right.tolist()


@pytest.mark.parametrize("worst", [0, 30])
def test_the_six_items_of_a_handle(worst: int) -> None:
    job = make_job(2, [5, 9], 16, 2, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        handle = dispatch(buffer, job, rank, num_worst_tokens=worst)[4]
        prefix, one, two, tokens, in_rank, three = handle
        ends = torch.tensor(received(job, rank)[4]).cumsum(0)
        right = torch.full((2, 2), -1)
        right[:, rank] = ends
        right_tokens = source_tokens(job, rank)
        assert (prefix.dtype, prefix.tolist()) == (torch.int32, right.tolist())
        assert tokens.dtype is torch.int32
        assert tokens.tolist() == right_tokens + [-1] * ((worst or len(right_tokens)) - len(right_tokens))
        assert torch.equal(in_rank, visits(job, rank))
        assert [each.numel() for each in (one, two, three)] == [0, 0, 0]
        assert len(handle) == 6
        assert torch.equal(handle[-2], in_rank)

    on_ranks(job, work)


def test_rows_of_other_sizes_and_kinds_have_plans_of_their_own() -> None:
    """Codes and bfloat16 rows of one width share a plan; combine takes any width that was sent, and others too."""
    job = make_job(2, [5, 9], 32, 3, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, *_, handle, _ = dispatch(buffer, job, rank)
        copies = visits(job, rank).sum(1, keepdim=True)
        codes = job.x[rank].to(torch.float8_e4m3fn), torch.arange(len(job.x[rank])).view(-1, 1).int()
        (again, tokens), *_ = buffer.dispatch(codes, handle)
        assert torch.equal(again.float(), received(job, rank)[0].to(torch.float8_e4m3fn).float())
        assert tokens.flatten().tolist() == source_tokens(job, rank)
        for width in (1, 2, 3):  # 64 elements were sent, 96 were not
            y = recv_x.repeat(1, width)
            if width == 2:
                assert torch.equal(buffer.dispatch(job.x[rank].repeat(1, 2), handle)[0], y)
            for bias in (None, torch.ones(len(job.x[rank]), 32 * width, dtype=BF16)):
                out, home, event = buffer.combine(y, handle, bias=bias)
                right = job.x[rank].repeat(1, width).float() * copies + (0 if bias is None else 1)
                assert (out.dtype, home, event.event) == (BF16, None, None)
                assert torch.equal(out, right.bfloat16())
        assert buffer.combine(recv_x, handle, async_finish=True)[2].event is not None

    on_ranks(job, work)


def test_a_worst_case_larger_than_the_buffer() -> None:
    """Rows beyond what any rank can receive are there, and combine ignores them."""
    job = make_job(2, [5, 9], 16, 2, 4)

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        for worst in (sum(map(len, job.x)), 1000):
            recv_x, ids, weights, counts, handle, _ = dispatch(buffer, job, rank, num_worst_tokens=worst)
            rows, right_ids, *_ = received(job, rank)
            assert (len(recv_x), ids.shape, weights.shape, counts) == (worst, (worst, 2), (worst, 2), [])
            assert ids.dtype is torch.int64
            assert ids.tolist() == right_ids.tolist() + [[-1, -1]] * (worst - len(rows))
            again, *_ = buffer.dispatch(job.x[rank], handle)
            assert again.shape == recv_x.shape
            assert torch.equal(again[: len(rows)], rows)
            y = torch.full_like(recv_x, torch.nan)
            y[: len(rows)] = rows
            for bias in (None, torch.zeros_like(job.x[rank])):
                out, _, _ = buffer.combine(y, handle, bias=bias)
                assert torch.equal(out, (job.x[rank].float() * visits(job, rank).sum(1, keepdim=True)).bfloat16())

    on_ranks(job, work)


def test_first_rows_and_biases() -> None:
    t = torch.arange(6).view(3, 2)
    assert [first_rows(t, number).shape for number in (0, 2, 3, 5)] == [(0, 2), (2, 2), (3, 2), (5, 2)]
    assert torch.equal(first_rows(t, 5)[:3], t)
    assert torch.equal(first_rows(t, 2), t[:2])
    assert first_rows(t, 5).dtype is t.dtype
    assert biases(None) == ()
    assert biases(t) == (t,)
    assert biases((t, t)) == biases([t, t]) == (t, t)  # type: ignore[arg-type]


def rows_of(hidden: int = 16, num_experts: int = 4) -> Rows:
    return Rows("tokens", hidden, 1, num_experts, BF16)


def send(exchange: Exchange, tokens: int, rows: Rows, bound: int | None = None) -> Any:
    ids = torch.full((tokens, 1), exchange.rank)
    return exchange.dispatch(rows, zeros(tokens, rows.hidden), ids, torch.ones(tokens, 1), bound)


def test_buffers_grow_and_stay() -> None:
    def work(group: ThreadGroup) -> list[Any]:
        exchange, made = Exchange(group, CASE_TIMEOUT_S), dict[Any, None]()
        sizes: list[int] = []
        assert exchange.of(rows_of()) is exchange.of(None) is None
        for tokens, rows, bound in ((3, rows_of(), None), (32, rows_of(), None), (33, rows_of(), None),
                                    (3, rows_of(32), None), (20, rows_of(), None), (3, rows_of(8), 5),
                                    (3, rows_of(8), 4), (3, rows_of(8), 6), (65, rows_of(24), None)):  # fmt: skip
            received = send(exchange, tokens if group.rank else 1, rows, bound)
            assert exchange.of(rows) is received.buffer
            assert received.handle.tag == 0
            made[received.buffer] = None
            sizes.append(received.buffer.spec.num_max_tokens_per_rank)
        assert {*exchange.buffers} == {*made}  # the outgrown ones too
        assert len(exchange.buffers) == 6
        with pytest.raises(TooManyTokens):
            send(exchange, 7, rows_of(8), 6)
        assert len(exchange.buffers) == 6
        exchange.close()
        assert exchange.buffers == []
        assert exchange.of(rows_of()) is None
        return sizes

    assert ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S) == [[32, 32, 64, 32, 64, 5, 5, 6, 128]] * 2


@pytest.mark.parametrize("later", [False, True], ids=["first buffer", "later buffer"])
@pytest.mark.parametrize(
    ("rows", "bound", "name", "got", "expected"),
    [
        (rows_of(32), None, "hidden", 32, 16),
        (rows_of(16, 8), None, "num_experts", 8, 4),
        (rows_of(), 50, "num_max_dispatch_tokens_per_rank * num_topk", 50, None),
    ],
)
def test_ranks_that_disagree_about_a_buffer(
    rows: Rows, bound: Any, name: str, got: Any, expected: Any, later: bool
) -> None:
    def work(group: ThreadGroup) -> None:
        exchange = Exchange(group, CASE_TIMEOUT_S)
        if later:
            send(exchange, 3, rows_of(64))
        with pytest.raises(ConfigMismatch) as caught:
            send(exchange, 3, *((rows, bound) if group.rank else (rows_of(), None)))
        text = f"{name}: got {got} on rank 1, expected {expected} as on rank 0 ("
        assert str(caught.value).startswith(text)
        assert (caught.value.rank, caught.value.peer) == (group.rank, 1)

    ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)


@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_a_refusal_where_peers_come_to_make_a_buffer(refuses: int) -> None:
    def work(group: ThreadGroup) -> None:
        exchange, error = Exchange(group, CASE_TIMEOUT_S), InvalidInput("x: got nothing", rank=refuses)
        for _ in range(2):
            with pytest.raises(MoeRtError) as caught:
                exchange.refuse(None, error) if group.rank == refuses else send(exchange, 3, rows_of())
            if group.rank == refuses:
                assert caught.value is error
                continue
            text = (
                f"rank {group.rank}: rank {refuses} refused its input: x: got nothing (moe-rt docs errors#invalidinput)"
            )
            assert type(caught.value) is InvalidInput
            assert (str(caught.value), caught.value.rank, caught.value.peer) == (text, group.rank, refuses)
        assert exchange.buffers == []
        send(exchange, 3, rows_of())

    ThreadGroup.run(work, 3, timeout_s=CASE_TIMEOUT_S)


def test_a_refusal_is_where_peers_dispatched_last() -> None:
    """A buffer may be used last and not made last."""

    def work(group: ThreadGroup) -> None:
        exchange = Exchange(group, 60.0)
        for rows in (rows_of(), rows_of(32), rows_of()):
            send(exchange, 3, rows)
        error = InvalidInput("x: got nothing")
        with pytest.raises(InvalidInput, match="x: got nothing" if group.rank else "rank 1"):
            exchange.refuse(None, error) if group.rank == 1 else send(exchange, 3, rows_of())

    ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)


def test_rows_that_a_function_writes() -> None:
    """It is not called for more rows than the buffer holds, which every rank refuses."""

    def work(group: ThreadGroup) -> None:
        exchange, calls = Exchange(group, CASE_TIMEOUT_S), list[int]()

        def write(window: torch.Tensor) -> None:
            calls.append(len(window))
            window.fill_(float(5 + group.rank))

        for tokens in (32, 3, 33):
            ids = torch.full((tokens, 1), 3 - 3 * group.rank)
            received = exchange.dispatch(rows_of(), write, ids, torch.ones(tokens, 1, dtype=torch.float64))
            assert received.handle.offs.tolist()[-1] == tokens
            assert (received.x[:tokens] == 6.0 - group.rank).all()
            assert received.weights.dtype is torch.float32
            assert received.ids[:tokens].unique().tolist() == [group.rank and 1]
        assert calls == [32, 3, 33]
        assert [buffer.spec.num_max_tokens_per_rank for buffer in exchange.buffers] == [64, 32]

    ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)


def test_ops_leave_no_graph() -> None:
    """Gradients that are recorded elsewhere do not reach them."""
    job = make_job(1, [5], 32, 2, 4)
    group = ThreadGroup.make(1)[0]
    buffer = deep_ep.Buffer(group, BYTES, timeout_s=CASE_TIMEOUT_S)
    x, weights = job.x[0].clone().requires_grad_(), job.topk_weights[0].clone().requires_grad_()
    arguments = layout_arguments(buffer, job, 0) | {"topk_idx": job.topk_idx[0]}
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, **arguments, topk_weights=weights)
    out, home, _ = buffer.combine(x.detach().requires_grad_()[: len(recv_x)], handle, topk_weights=recv_weights)
    assert not any(t.requires_grad for t in (recv_x, recv_weights, out, home))
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert torch.equal(buffer.combine(recv_x, handle)[0], buffer.combine(recv_x, handle)[0])
        assert not torch.is_grad_enabled()


def test_ops_make_tensors_where_their_operands_are() -> None:
    """A default device, which DeepEP's set-up of ranks changes, is not theirs."""
    job = make_job(2, [5, 9], 512, 3, 4)

    def work(group: ThreadGroup) -> None:
        rank = group.rank
        buffer = deep_ep.Buffer(group, BYTES, BYTES, True, timeout_s=CASE_TIMEOUT_S)
        elastic = deep_ep.ElasticBuffer(
            group, num_max_tokens_per_rank=16, hidden=512, num_cpu_timeout_secs=int(CASE_TIMEOUT_S)
        )
        bias = torch.ones_like(job.x[rank])
        waits = torch.zeros(2, dtype=torch.int64)
        results: list[list[torch.Tensor]] = []
        for device in ("cpu", "cpu", "meta"):
            with torch.device(device):
                outs = []
                elastic.barrier()
                for topk in (True, False):
                    recv_x, _, weights, _, handle, _ = dispatch(buffer, job, rank, topk=topk)
                    outs += [recv_x, *buffer.combine(recv_x, handle, topk_weights=weights, bias=bias)[:2], handle[3]]
                recv_x, ids, weights, _, handle, _ = dispatch(buffer, job, rank, num_worst_tokens=20)
                outs += [ids, *buffer.combine(recv_x, handle)[:1]]
                for fp8 in (True, False):
                    given = job.x[rank], job.topk_idx[rank], 16, 4, None, waits
                    low_x, count, low_handle, _, _ = buffer.low_latency_dispatch(*given, use_fp8=fp8)
                    outs += [count, *low_handle[:2]]
                routing = job.topk_idx[rank], job.topk_weights[rank]
                buffer.get_next_low_latency_combine_buffer(low_handle).copy_(low_x)
                options = {"zero_copy": True, "combine_wait_recv_cost_stats": waits}
                outs.append(buffer.low_latency_combine(low_x, *routing, low_handle, **options)[0])
                for expand in (False, True):
                    for given_weights in (routing[1], None):
                        options = {"num_experts": 4, "do_expand": expand, "do_zero_padding": expand}
                        recv_x, _, weights, ep, _ = elastic.dispatch(job.x[rank], routing[0], given_weights, **options)
                        outs += [recv_x, ep.recv_src_metadata, ep.dst_buffer_slot_idx]
                        outs += elastic.combine(recv_x, ep, topk_weights=weights, bias=bias)[:2]
            results.append([t for t in outs if t is not None and t.numel()])
        for one, other in zip(*results[1:], strict=True):
            assert one.device == other.device
            assert one.shape == other.shape

    ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)


def test_buffers_are_made_where_the_ranks_are() -> None:
    def work(group: ThreadGroup) -> None:
        exchange = Exchange(group, CASE_TIMEOUT_S)
        for tokens, rows in ((3, rows_of()), (3, rows_of(32)), (40, rows_of())):
            given = zeros(tokens, rows.hidden), torch.full((tokens, 1), group.rank), torch.ones(tokens, 1)
            with torch.device("meta"):
                assert exchange.dispatch(rows, *given).x.is_cpu

    ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)
