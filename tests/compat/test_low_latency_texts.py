"""Refusals of deep_ep's low-latency ops and of its buffers, for every condition, and the edges that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.oracle import make_job
from compat.test_normal import BYTES, dispatch
from compat.texts import Cases, across, check, f32, on_two_ranks, said, zeros
from support.ranks import CASE_TIMEOUT_S

from moe_rt import Buffer, ThreadGroup
from moe_rt.buffer import packed
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.config import low_latency_bytes
from moe_rt.compat.deep_ep.low_latency import LowLatencyHandle
from moe_rt.errors import GroupClosed, InvalidConfig, InvalidInput

JOB = make_job(2, [6, 6], 512, 3, 4)
TWICE = "topk_idx: got an expert twice for a token, expected different experts; sum their weights first"
IDS = "expected contiguous torch.int64 [6, 3] on cpu"
ONE_OF_THEM = "async_finish: got True with return_recv_hook=True, expected one of them"
FOREIGN = "handle: got another buffer's, or a copy of its items, expected one that low_latency_dispatch returned"


def make(group: ThreadGroup) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, BYTES, BYTES, True, timeout_s=CASE_TIMEOUT_S)


def given(rank: int) -> dict[str, Any]:
    sizes = {"num_max_dispatch_tokens_per_rank": 8, "num_experts": 4, "use_fp8": False}
    return {"x": JOB.x[rank], "topk_idx": JOB.topk_idx[rank], **sizes}


def test_tensors_of_dispatch() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        x, ids = JOB.x[rank], JOB.topk_idx[rank]
        twice = ids.clone()
        twice[0] = torch.tensor([2, 1, 2])
        stats, waits = "cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats"
        rows, wide = "expected contiguous bfloat16 [T, H]", "expected H a multiple of"
        ints = "expected int32 [2] on cpu"
        cases: Cases = [
            ({"x": [1]}, f"x: got list, {rows}"),
            ({"x": x.float()}, f"x: got torch.float32 [6, 512], {rows}"),
            ({"x": x.flatten()}, f"x: got torch.bfloat16 [3072], {rows}"),
            ({"x": across(6, 512)}, f"x: got torch.bfloat16 [6, 512], not contiguous, {rows}"),
            ({"x": zeros(6, 64)}, f"x: got torch.bfloat16 [6, 64], {wide} 128"),
            ({"x": zeros(6, 0)}, f"x: got torch.bfloat16 [6, 0], {wide} 128"),
            ({"x": zeros(6, 128), "use_fp8": True}, f"x: got torch.bfloat16 [6, 128], {wide} 512"),
            ({"topk_idx": ids[1:]}, f"topk_idx: got torch.int64 [5, 3], {IDS}"),
            ({"topk_idx": twice}, TWICE),
            (
                {"x": zeros(9, 512), "topk_idx": torch.full((9, 3), -1)},
                "x: got 9 tokens, expected at most num_max_dispatch_tokens_per_rank = 8",
            ),
            ({stats: zeros(2, dtype=f32)}, f"{stats}: got torch.float32 [2], {ints}"),
            ({stats: zeros(3, dtype=torch.int32)}, f"{stats}: got torch.int32 [3], {ints}"),
            ({stats: zeros(2, dtype=torch.int32).to("meta")}, f"{stats}: got torch.int32 [2] on meta, {ints}"),
            ({waits: zeros(2, dtype=torch.int32)}, "wait_recv_cost_stats: got torch.int32 [2], expected int64 [2]"),
            ({waits: zeros(3, dtype=torch.int64)}, "wait_recv_cost_stats: got torch.int64 [3], expected int64 [2]"),
            ({"x": zeros(6, 128)}, ""),
            ({stats: zeros(2, dtype=torch.int32), waits: zeros(1, 2, dtype=torch.int64)}, ""),
        ]
        check(rank, buffer.low_latency_dispatch, given(rank), cases)

    on_two_ranks(make, work)


def test_numbers_of_dispatch() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        most, ranks = "num_max_dispatch_tokens_per_rank", "expected a multiple of 2 ranks"
        bound = "expected a positive number that times 2 ranks is a multiple of 4, below 2^31 rows"
        exponents = "use_ue8m0: got True, expected use_fp8=True and round_scale=True with it"
        cases: Cases = [
            ({"num_experts": 0}, f"num_experts: got 0, {ranks}"),
            ({"num_experts": -2}, f"num_experts: got -2, {ranks}"),
            ({"num_experts": 5}, f"num_experts: got 5, {ranks}"),
            ({"num_experts": 4.0}, f"num_experts: got 4.0, {ranks}"),
            ({most: 0}, f"{most}: got 0, {bound}"),
            ({most: 7}, f"{most}: got 7, {bound}"),
            ({most: 8.0}, f"{most}: got 8.0, {bound}"),
            ({most: 1 << 29}, f"{most}: got {1 << 29}, {bound}"),
            ({most: 6}, ""),
            ({"use_ue8m0": True, "round_scale": True}, exponents),
            ({"use_ue8m0": True, "use_fp8": True}, exponents),
            ({"use_ue8m0": True, "use_fp8": True, "round_scale": True}, ""),
            ({"async_finish": True, "return_recv_hook": True}, ONE_OF_THEM),
            ({"async_finish": True}, ""),
        ]
        check(rank, buffer.low_latency_dispatch, given(rank), cases)

    on_two_ranks(make, work)


def test_combine() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(**given(rank))
        other = make(buffer.group).low_latency_dispatch(**given(rank))[2]
        x, ids, weights = JOB.x[rank], JOB.topk_idx[rank], JOB.topk_weights[rank]
        fewer, others = ids.clone(), ids.clone()
        fewer[0], others[0] = -1, (torch.arange(3) + 1 if 0 in ids[0].tolist() else 0)
        more = torch.where(ids < 0, 3, ids)  # an expert where the dispatch had none
        pairs = torch.zeros(6 * 512 + 8, dtype=torch.bfloat16)
        rows, doubles = "expected contiguous torch.bfloat16 [2, 16, 512] on cpu", weights.double()
        out = "expected contiguous torch.bfloat16 [6, 512] on cpu"
        entries = "topk_weights: got torch.float64 [6, 3], expected contiguous torch.float32 [6, 3] on cpu"
        experts = "topk_idx: got other experts, expected those of the dispatch, or -1"
        columns, waits = across(6, 3, dtype=torch.int64), "combine_wait_recv_cost_stats"
        cases: Cases = [
            ({"handle": tuple(handle)}, FOREIGN),
            ({"handle": other}, FOREIGN),
            ({"x": recv_x.float()}, f"x: got torch.float32 [2, 16, 512], {rows}"),
            ({"x": recv_x[:, 1:].contiguous()}, f"x: got torch.bfloat16 [2, 15, 512], {rows}"),
            ({"zero_copy": True}, "zero_copy: got True, expected rows in get_next_low_latency_combine_buffer(handle)"),
            ({"topk_idx": ids.int()}, f"topk_idx: got torch.int32 [6, 3], {IDS}"),
            ({"topk_idx": columns}, f"topk_idx: got torch.int64 [6, 3], not contiguous, {IDS}"),
            ({"topk_idx": ids[1:]}, f"topk_idx: got torch.int64 [5, 3], {IDS}"),
            ({"topk_idx": others}, experts),
            ({"topk_idx": more}, experts),
            ({"topk_idx": fewer}, ""),
            ({"topk_weights": doubles}, entries),
            ({"topk_weights": doubles, "topk_idx": fewer}, entries),
            ({"out": x.float()}, f"out: got torch.float32 [6, 512], {out}"),
            ({"out": x[1:]}, f"out: got torch.bfloat16 [5, 512], {out}"),
            ({"out": pairs[1:3073].view(6, 512)}, "out: got an odd address, expected a multiple of 16"),
            ({"out": pairs[7:3079].view(6, 512)}, "out: got an odd address, expected a multiple of 16"),
            ({"out": pairs[8:].view(6, 512)}, ""),
            ({waits: zeros(3, dtype=torch.int64)}, "wait_recv_cost_stats: got torch.int64 [3], expected int64 [2]"),
            ({waits: zeros(2, dtype=torch.int64)}, ""),
            ({"async_finish": True, "return_recv_hook": True}, ONE_OF_THEM),
            ({"async_finish": True}, ""),
        ]
        right = {"x": recv_x, "topk_idx": ids, "topk_weights": weights, "handle": handle}
        check(rank, buffer.low_latency_combine, right, cases)
        check(rank, buffer.get_next_low_latency_combine_buffer, {"handle": handle}, [({"handle": other}, FOREIGN)])
        expected = "use_logfmt: got True, expected False: rows return as bfloat16"
        assert said(lambda: buffer.low_latency_combine(**right, use_logfmt=True)) == expected

    on_two_ranks(make, work)


def test_a_row_count_below_two_to_the_31() -> None:
    """32-bit counts; the memory for it is refused next."""
    buffer = make(ThreadGroup.make(1)[0])
    for most, name in ((1 << 30, "num_max_dispatch_tokens_per_rank"), ((1 << 30) - 4, "num_rdma_bytes")):
        given = zeros(1, 128), torch.zeros(1, 1).long(), most, 2
        text = said(lambda given=given: buffer.low_latency_dispatch(*given, use_fp8=False))
        assert text.startswith(f"rank 0: {name}: got ")


def test_memory_and_mode_of_a_size() -> None:
    group, x, ids = ThreadGroup.make(1)[0], zeros(1, 512), torch.zeros(1, 1).long()
    needed = low_latency_bytes(4, 512, 2)
    for size, mode, text in (
        (needed, False, "low_latency_mode: got False, expected a Buffer made with low_latency_mode=True"),
        (needed - 1, True, f"num_rdma_bytes: got {needed - 1}, expected {needed}, as DeepEP needs "
                           "(get_low_latency_rdma_size_hint)"),
    ):  # fmt: skip
        buffer = deep_ep.Buffer(group, 0, size, mode)
        assert said(lambda buffer=buffer: buffer.low_latency_dispatch(x, ids, 4, 2)) == f"rank 0: {text}"
    fits = deep_ep.Buffer(group, 0, needed, True)
    for fp8 in (True, False):
        assert said(lambda fp8=fp8: fits.low_latency_dispatch(x, ids, 4, 2, use_fp8=fp8)) == ""


def test_hooks_are_called_once_in_any_order() -> None:
    """An op with a hook leaves room for one more; a third one is refused until a hook was called."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        def dispatch() -> Any:
            return buffer.low_latency_dispatch(**given(rank), return_recv_hook=True)

        def combine(op: Any) -> Any:
            routing = JOB.topk_idx[rank], JOB.topk_weights[rank]
            return buffer.low_latency_combine(op[0], *routing, op[2], return_recv_hook=True)

        not_called = "handle: got that of a low_latency_dispatch whose hook was never called, expected its hook called"
        first, second = dispatch(), dispatch()
        assert said(dispatch) == (
            f"rank {rank}: return_recv_hook: got low_latency_dispatch while the hooks of 2 other ops were not called, "
            "expected at most 2 outstanding ops; call a hook"
        )
        assert (second[1] >= 0).all()  # an op that is refused completes those before it, too
        assert said(lambda: combine(first)) == f"rank {rank}: {not_called}"
        assert not first[2].arrived
        first[4]()
        assert first[2].arrived
        assert not second[2].arrived
        assert said(lambda: combine(second)) == f"rank {rank}: {not_called}"
        _, _, hook = combine(first)
        hook()
        second[4]()
        for call, name in ((second[4], "low_latency_dispatch"), (hook, "low_latency_combine")):
            expected = "expected one call for each op with return_recv_hook=True"
            assert said(call) == f"rank {rank}: {name}: hook: got a second call, {expected}"

    on_two_ranks(make, work)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_an_op_completes_the_one_before_it(name: str, refused: bool) -> None:
    """Its hook then only says that the results are there."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(**given(rank))
        routing = {"topk_idx": JOB.topk_idx[rank], "topk_weights": JOB.topk_weights[rank], "handle": handle}
        right = buffer.low_latency_combine(recv_x, **routing)[0]

        def last() -> None:
            x = recv_x.float() if refused else recv_x
            if name == "combine":
                buffer.low_latency_combine(x, **routing)
            else:
                buffer.low_latency_dispatch(**{**given(rank), "x": JOB.x[rank].float() if refused else JOB.x[rank]})

        stats = zeros(2, dtype=torch.int32)
        options = {"return_recv_hook": True, "cumulative_local_expert_recv_stats": stats}
        _, count, _, _, hook = buffer.low_latency_dispatch(**given(rank), **options)
        assert (count == -1).all()
        assert said(last).startswith(f"rank {rank}: x: got torch.float32" if refused else "")
        assert (count >= 0).all()
        assert torch.equal(stats, count)
        hook()
        assert torch.equal(stats, count)
        out = torch.full_like(right, 7.0)
        _, _, hook = buffer.low_latency_combine(recv_x, **routing, out=out, return_recv_hook=True)
        assert (out == 7.0).all()
        said(last)
        assert torch.equal(out, right)
        hook()

    on_two_ranks(make, work)


def test_hooks_that_were_never_called_are_named_when_the_buffer_ends() -> None:
    def work(group: ThreadGroup) -> str:
        buffer = deep_ep.Buffer(group, BYTES, BYTES, True, explicitly_destroy=True, timeout_s=CASE_TIMEOUT_S)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(**given(group.rank))
        routing = JOB.topk_idx[group.rank], JOB.topk_weights[group.rank], handle
        buffer.low_latency_combine(recv_x, *routing, return_recv_hook=True)
        buffer.low_latency_dispatch(**given(group.rank), return_recv_hook=True)
        text = said(buffer.destroy)
        for op in (lambda: buffer.low_latency_dispatch(**given(group.rank)),
                   lambda: buffer.low_latency_combine(recv_x, *routing),
                   lambda: dispatch(buffer, JOB, group.rank),
                   lambda: buffer.combine(recv_x, handle)):  # fmt: skip
            with pytest.raises(GroupClosed) as caught:
                op()
            closed = f"rank {group.rank}: got an op on a destroyed deep_ep.Buffer, expected a living one ("
            assert str(caught.value).startswith(closed)
        return text

    names = "low_latency_combine, low_latency_dispatch"
    for rank, text in enumerate(ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)):
        assert text == f"rank {rank}: destroy: got hooks never called of {names}, expected every hook called"


def test_the_items_of_a_handle() -> None:
    """They are made when they are first read, and are the same tensors from then on."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        _, count, handle, _, _ = buffer.low_latency_dispatch(**given(rank))
        assert isinstance(handle, LowLatencyHandle)
        tokens, ranges, most, hidden, num_experts = handle
        assert (tokens.dtype, tokens.shape, ranges.dtype, ranges.shape) == (torch.int32, (2, 16), torch.int64, (2, 2))
        assert (most, hidden, num_experts, len(handle)) == (8, 512, 4, 5)
        assert handle[0] is tokens
        assert handle[1:3][0] is ranges
        assert (ranges & 0xFFFFFFFF).sum(1).tolist() == count.tolist()
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        assert (rows.dtype, rows.shape, rows.is_contiguous()) == (torch.bfloat16, (2, 16, 512), True)
        assert buffer.get_next_low_latency_combine_buffer(handle) is rows

    on_two_ranks(make, work)


def test_waits_for_peers_are_added() -> None:
    """Nanoseconds of every op that asks for them, on top of what the caller counted before."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        waits, again = torch.full((2,), 1 << 40), torch.zeros(1, 2, dtype=torch.int64)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(**given(rank), dispatch_wait_recv_cost_stats=waits)
        assert (waits >= 1 << 40).all()
        assert (waits - (1 << 40) < 600e9).all()
        before = sum(inner.waited_ns()[1 - rank] for inner in buffer._exchanges[1].buffers)
        routing = JOB.topk_idx[rank], JOB.topk_weights[rank], handle
        buffer.low_latency_combine(recv_x, *routing, combine_wait_recv_cost_stats=again)
        after = sum(inner.waited_ns()[1 - rank] for inner in buffer._exchanges[1].buffers)
        assert int(again[0, 1 - rank]) == after - before

    on_two_ranks(make, work)


@pytest.mark.parametrize("hook", [False, True])
def test_waits_of_one_op_are_what_it_adds(monkeypatch: pytest.MonkeyPatch, hook: bool) -> None:
    """Buffers count more nanoseconds each time that they are asked: here ten for rank 0 and a hundred for rank 1."""
    asked: dict[Buffer, int] = {}

    def waited_ns(self: Buffer) -> list[int]:
        asked[self] = asked.get(self, 0) + 1
        return [10 * asked[self], 100 * asked[self]]

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        buffer.low_latency_dispatch(**given(rank))
        monkeypatch.setattr(Buffer, "waited_ns", waited_ns)
        waits, again = torch.tensor([1, 2]), torch.tensor([[3, 4]])
        options: dict[str, Any] = {"dispatch_wait_recv_cost_stats": waits, "return_recv_hook": hook}
        recv_x, _, handle, _, receive = buffer.low_latency_dispatch(**given(rank), **options)
        if receive is not None:
            assert waits.tolist() == [1, 2]
            receive()
        assert waits.tolist() == [11, 102]
        routing = JOB.topk_idx[rank], JOB.topk_weights[rank], handle
        options = {"combine_wait_recv_cost_stats": again, "return_recv_hook": hook}
        receive = buffer.low_latency_combine(recv_x, *routing, **options)[2]
        if receive is not None:
            receive()
        assert again.tolist() == [[13, 104]]

    on_two_ranks(make, work)


def test_a_hook_that_failed_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = deep_ep.Buffer(ThreadGroup.make(1)[0], 0, BYTES, True, explicitly_destroy=True)
    hook = buffer.low_latency_dispatch(zeros(1, 512), torch.zeros(1, 1).long(), 4, 2, return_recv_hook=True)[-1]

    def finish(self: packed.Half) -> None:
        raise GroupClosed("got nothing")

    monkeypatch.setattr(packed.Half, "finish", finish)
    assert hook is not None
    assert said(hook) == "got nothing"
    assert said(hook).startswith("rank 0: low_latency_dispatch: hook: got a second call")
    assert said(buffer.destroy) == ""


def test_ranks_that_count_no_waits_add_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ranks count none."""
    monkeypatch.setattr(Buffer, "waited_ns", lambda self: [])

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        waits = torch.tensor([3, 4])
        buffer.low_latency_dispatch(**given(rank), dispatch_wait_recv_cost_stats=waits)
        assert waits.tolist() == [3, 4]

    on_two_ranks(make, work)


def test_what_a_buffer_refuses() -> None:
    group = ThreadGroup.make(1)[0]
    masks = "expected enable_shrink=False; moe_rt.elastic continues without dead ranks"
    buffer = deep_ep.Buffer(group, 5, 7, True)
    assert (buffer.group, buffer.rank, buffer.group_size) == (group, 0, 1)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (5, 7, True)
    assert (buffer.explicitly_destroy, buffer.enable_shrink) == (False, False)
    assert deep_ep.Buffer.is_sm90_compiled() is True
    assert isinstance(deep_ep.Buffer.capture().event, deep_ep.EventHandle)
    refused = {
        "destroy: got explicitly_destroy=False, expected a Buffer made with explicitly_destroy=True": buffer.destroy,
        f"enable_shrink: got True, {masks}": lambda: deep_ep.Buffer(group, enable_shrink=True),
        "comm: got str, expected None and a torch process group": lambda: deep_ep.Buffer(group, comm="mpi"),
        "get_comm_stream: got a buffer of CPU ranks, which have no streams; expected no call": buffer.get_comm_stream,
        "get_local_buffer_tensor: got a call, expected moe_rt.Buffer.token_window": lambda: (
            buffer.get_local_buffer_tensor(torch.int8)
        ),
        f"low_latency_update_mask_buffer: got a call, {masks}": lambda: buffer.low_latency_update_mask_buffer(0),
        f"low_latency_query_mask_buffer: got a call, {masks}": lambda: buffer.low_latency_query_mask_buffer(zeros(1)),
        f"low_latency_clean_mask_buffer: got a call, {masks}": buffer.low_latency_clean_mask_buffer,
    }
    for text, call in refused.items():
        with pytest.raises((InvalidConfig, InvalidInput)) as caught:
            call()
        assert str(caught.value).removeprefix("rank 0: ").startswith(f"{text} (")
    buffer.clean_low_latency_buffer(8, 512, 4)


def test_ops_of_a_gpu_run_on_its_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ThreadGroup.make(1)[0]
    buffers = deep_ep.Buffer(group), deep_ep.ElasticBuffer(group, 2 << 20)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    assert [buffer.get_comm_stream() for buffer in buffers] == ["stream", "stream"]


def test_a_layout_is_of_int64_ids_and_experts_of_every_rank() -> None:
    buffer = deep_ep.Buffer(ThreadGroup.make(2)[1])
    ids = torch.tensor([[0, 3]])
    assert buffer.get_dispatch_layout(ids, 4, async_finish=True)[4].event is not None
    assert buffer.get_dispatch_layout(ids, 4)[4].event is None
    for number in (0, -2, 5):
        text = f"rank 1: num_experts: got {number}, expected a multiple of 2 ranks"
        assert said(lambda number=number: buffer.get_dispatch_layout(ids, number)) == text
    for wrong, got in ((None, "NoneType"), (ids.int(), "torch.int32 [1, 2]"), (ids[0], "torch.int64 [2]")):
        text = f"rank 1: topk_idx: got {got}, expected int64 [T, K]"
        assert said(lambda wrong=wrong: buffer.get_dispatch_layout(wrong, 4)) == text
