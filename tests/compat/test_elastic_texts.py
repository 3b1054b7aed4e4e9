"""Refusals of deep_ep's ElasticBuffer, for every condition; its attributes; and where each option arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.oracle import make_job
from compat.texts import Cases, across, check, f32, on_two_ranks, said, zeros
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.sizes import combine_bytes, dispatch_bytes
from moe_rt.errors import GroupClosed, InvalidConfig, InvalidInput

JOB = make_job(2, [6, 6], 64, 3, 4)
MIB2 = 2 << 20
TWICE = "topk_idx: got an expert twice for a token, expected different experts; sum their weights first"
HANDLE = "handle: got another buffer's, or {}, expected one that this buffer's dispatch returned"


def make(group: ThreadGroup, **options: Any) -> deep_ep.ElasticBuffer:
    return deep_ep.ElasticBuffer(
        group, MIB2, num_max_tokens_per_rank=8, num_cpu_timeout_secs=int(CASE_TIMEOUT_S), **options
    )


def given(rank: int, **changed: Any) -> dict[str, Any]:
    routing = {"topk_idx": JOB.topk_idx[rank], "topk_weights": JOB.topk_weights[rank], "num_experts": 4}
    return {"x": JOB.x[rank], **routing, **changed}


def test_tensors_of_dispatch() -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        x, ids, weights = JOB.x[rank], JOB.topk_idx[rank], JOB.topk_weights[rank]
        twice = ids.clone()
        twice[0] = torch.tensor([2, 1, 2])
        rows = "expected contiguous bfloat16 [T, H], or a tuple of codes [T, H] and scales, rows of 16 n bytes"
        numbers, entries = (
            "expected contiguous torch.int64 [6, {}] on cpu",
            "expected contiguous torch.float32 [6, 3] on cpu",
        )
        narrow, stats, ints = weights[:, :2].contiguous(), "cumulative_local_expert_recv_stats", "expected int32 [2]"
        cases: Cases = [
            ({"x": x.float()}, f"x: got torch.float32 [6, 64], {rows}"),
            ({"topk_idx": None}, f"topk_idx: got NoneType, {numbers.format('K')}"),
            ({"topk_idx": ids.int()}, f"topk_idx: got torch.int32 [6, 3], {numbers.format(3)}"),
            ({"topk_idx": ids[1:]}, f"topk_idx: got torch.int64 [5, 3], {numbers.format(3)}"),
            ({"topk_idx": twice}, TWICE),
            ({"topk_weights": weights.double()}, f"topk_weights: got torch.float64 [6, 3], {entries}"),
            ({"topk_weights": narrow}, f"topk_weights: got torch.float32 [6, 2], {entries}"),
            ({"topk_weights": None}, ""),
            ({stats: zeros(2, dtype=f32)}, f"{stats}: got torch.float32 [2], {ints}"),
            ({stats: zeros(3, dtype=torch.int32)}, f"{stats}: got torch.int32 [3], {ints}"),
            ({stats: zeros(2, 1, dtype=torch.int32)}, f"{stats}: got torch.int32 [2, 1], {ints}"),
            ({stats: zeros(2, dtype=torch.int32), "do_zero_padding": True, "do_expand": True}, ""),
        ]
        check(rank, buffer.dispatch, given(rank), cases)

    on_two_ranks(make, work)


def test_numbers_of_dispatch() -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        most, align, multiple = "num_max_tokens_per_rank", "expert_alignment", "expected a multiple of 2 ranks"
        bounds, positive = f"{most}, {align}: got", "expected positive numbers"
        needed = dispatch_bytes(2, 100_000, 128, 0, 3)
        cases: Cases = [
            ({"num_experts": None}, f"num_experts: got None, {multiple}"),
            ({"num_experts": 0}, f"num_experts: got 0, {multiple}"),
            ({"num_experts": 5}, f"num_experts: got 5, {multiple}"),
            ({"num_experts": 4.0}, f"num_experts: got 4.0, {multiple}"),
            ({most: 0}, f"{bounds} (0, 1), {positive}"),
            ({most: 8.0}, f"{bounds} (8.0, 1), {positive}"),
            ({align: 0}, f"{bounds} (8, 0), {positive}"),
            ({align: 1.0}, f"{bounds} (8, 1.0), {positive}"),
            ({most: 5}, f"x: got 6 tokens, expected at most {most} = 5"),
            ({most: 6}, ""),
            (
                {most: 100_000},
                f"num_bytes: got {MIB2}, expected at least {needed}, as DeepEP needs (get_buffer_size_hint)",
            ),
            ({"do_zero_padding": True}, "do_zero_padding: got True, expected do_expand=True with it"),
            (
                {"previous_event": 1},
                "previous_event: got an event, expected allocate_on_comm_stream=True with it",
            ),
            ({"previous_event": 1, "allocate_on_comm_stream": True}, ""),
        ]
        check(rank, buffer.dispatch, given(rank), cases)

    on_two_ranks(make, work)


def test_the_handle_of_dispatch() -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        handle, foreign = (each.dispatch(**given(rank))[3] for each in (buffer, make(buffer.group)))
        most, align = "num_max_tokens_per_rank", "expert_alignment"
        one_of = "expected neither topk_idx nor do_cpu_sync=True with a handle"
        own = f"(num_experts, {most}, {align}, do_expand): got {{}}, expected None, or the handle's (4, 8, 1, False)"
        ids = "expected contiguous torch.int64 [5, 3] on cpu"
        cases: Cases = [
            ({"handle": (1,)}, HANDLE.format("tuple")),
            ({"handle": foreign}, HANDLE.format("EPHandle")),
            ({"topk_idx": JOB.topk_idx[rank]}, f"topk_idx: got torch.int64 [6, 3], do_cpu_sync=None, {one_of}"),
            ({"do_cpu_sync": True}, f"topk_idx: got NoneType, do_cpu_sync=True, {one_of}"),
            ({"num_experts": 8}, own.format("(8, None, None, False)")),
            ({most: 9}, own.format("(None, 9, None, False)")),
            ({align: 2}, own.format("(None, None, 2, False)")),
            ({"do_expand": True}, own.format("(None, None, None, True)")),
            ({"num_experts": 4, most: 8, align: 1, "do_expand": False, "do_cpu_sync": False}, ""),
            ({"x": JOB.x[rank][1:], "topk_weights": None}, f"topk_idx: got torch.int64 [6, 3], {ids}"),
        ]
        check(rank, buffer.dispatch, given(rank, topk_idx=None, num_experts=None, handle=handle), cases)

    on_two_ranks(make, work)


@pytest.mark.parametrize("expand", [False, True], ids=["tokens", "expanded"])
def test_combine(expand: bool) -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        recv_x, _, weights, handle, _ = buffer.dispatch(**given(rank, do_expand=expand))
        foreign = make(buffer.group).dispatch(**given(rank, do_expand=expand))[3]
        n, bias = len(recv_x), JOB.x[rank]
        rows, shape = f"expected contiguous bfloat16 [{n}, H], H of 8 n", f"[{n}]" if expand else f"[{n}, 3]"
        less, other = (f"[{n - 1}]", f"[{n}, 3]") if expand else (f"[{n - 1}, 3]", f"[{n}]")
        of_other = zeros(n, 3, dtype=f32) if expand else zeros(n, dtype=f32)
        biases = "expected torch.bfloat16 [6, 64]"
        cases: Cases = [
            ({"handle": (1,)}, HANDLE.format("tuple")),
            ({"handle": foreign}, HANDLE.format("EPHandle")),
            ({"x": [1]}, f"x: got list, {rows}"),
            ({"x": recv_x.float()}, f"x: got torch.float32 [{n}, 64], {rows}"),
            ({"x": recv_x.flatten()}, f"x: got torch.bfloat16 [{64 * n}], {rows}"),
            ({"x": across(n, 64)}, f"x: got torch.bfloat16 [{n}, 64], not contiguous, {rows}"),
            ({"x": recv_x[1:]}, f"x: got torch.bfloat16 [{n - 1}, 64], {rows}"),
            ({"x": zeros(n, 12)}, f"x: got torch.bfloat16 [{n}, 12], {rows}"),
            ({"topk_weights": weights.double()}, f"topk_weights: got torch.float64 {shape}, expected float32 {shape}"),
            ({"topk_weights": weights[1:]}, f"topk_weights: got torch.float32 {less}, expected float32 {shape}"),
            ({"topk_weights": [1]}, f"topk_weights: got list, expected float32 {shape}"),
            ({"topk_weights": of_other}, f"topk_weights: got torch.float32 {other}, expected float32 {shape}"),
            ({"bias": bias.float()}, f"bias: got torch.float32 [6, 64], {biases}"),
            ({"bias": (bias, bias[1:])}, f"bias: got torch.bfloat16 [5, 64], {biases}"),
            ({"bias": (1.0, bias)}, f"bias: got float, {biases}"),
            ({"previous_event": 1}, "previous_event: got an event, expected allocate_on_comm_stream=True with it"),
            ({"previous_event": 1, "allocate_on_comm_stream": True}, ""),
        ]
        check(rank, buffer.combine, {"x": recv_x, "handle": handle, "topk_weights": weights, "bias": bias}, cases)

    on_two_ranks(make, work)


@pytest.mark.parametrize("several", [True, False])
def test_a_combine_of_wide_rows_needs_a_larger_buffer(several: bool) -> None:
    """The rows of combine may be wider than those of dispatch."""
    buffer = make(ThreadGroup.make(1)[0], allow_multiple_reduction=several)
    job = make_job(1, [6], 64, 3, 4)
    routing = {"topk_idx": job.topk_idx[0], "topk_weights": job.topk_weights[0], "num_experts": 4}
    handle = buffer.dispatch(job.x[0], **routing)[3]
    wide = (MIB2 // (8 if several else 24) // 32 * 32 - 32) // 2
    assert MIB2 - 24 * 32 < combine_bytes(1, 8, wide, 3, several) <= MIB2
    assert buffer.combine(zeros(handle.num_rows, wide), handle)[0].shape == (6, wide)
    needed = combine_bytes(1, 8, wide + 16, 3, several)
    text = f"rank 0: num_bytes: got {MIB2}, expected at least {needed}, as DeepEP needs (get_buffer_size_hint)"
    assert said(lambda: buffer.combine(zeros(handle.num_rows, wide + 16), handle)) == text


def test_weights_without_sums_on_each_rank() -> None:
    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> str:
        recv_x, _, weights, handle, _ = buffer.dispatch(**given(rank, do_expand=True))
        text = said(lambda: buffer.combine(recv_x, handle, topk_weights=weights))
        assert buffer.combine(recv_x, handle)[1] is None
        recv_x, _, weights, handle, _ = buffer.dispatch(**given(rank))
        assert torch.equal(
            buffer.combine(recv_x, handle, topk_weights=weights)[1],
            JOB.topk_weights[rank].masked_fill(JOB.topk_idx[rank] < 0, 0),
        )
        return f"{text} of {list(weights.shape)}"

    results = on_two_ranks(lambda group: make(group, allow_multiple_reduction=False), work)
    for rank, text in enumerate(results):
        assert text.startswith(f"rank {rank}: topk_weights: got torch.float32 [")
        assert "], expected None without allow_multiple_reduction of" in text


def test_attributes_of_a_buffer() -> None:
    group = ThreadGroup.make(4)[2]
    buffer = deep_ep.ElasticBuffer(group, 4 * MIB2, num_max_tokens_per_rank=9)
    assert (buffer.group, buffer.rank_idx, buffer.num_ranks, buffer.num_bytes) == (group, 2, 4, 4 * MIB2)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, 4)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, 2)
    assert (buffer.num_max_tokens_per_rank, buffer.explicitly_destroy, buffer.deterministic) == (9, False, False)
    assert (buffer.allow_hybrid_mode, buffer.allow_multiple_reduction) == (True, True)
    assert buffer.prefer_overlap_with_compute is True
    assert (buffer.num_allocated_qps, buffer.get_theoretical_num_sms(8, 2)) == (129, 20)
    assert [buffer.get_theoretical_num_qps(sms) for sms in (1, 7, 8, 9)] == [17, 113, 129, 129]
    options = {"deterministic": True, "allow_hybrid_mode": False, "allow_multiple_reduction": False}
    options |= {"prefer_overlap_with_compute": False, "explicitly_destroy": True}
    other = deep_ep.ElasticBuffer(group, MIB2, **options)
    assert {name: getattr(other, name) for name in options} == options
    assert other.num_allocated_qps == 17
    assert [other.get_theoretical_num_qps(sms) for sms in (1, 8, 9, 10, 40)] == [1, 8, 9, 9, 9]
    few = deep_ep.ElasticBuffer(group, MIB2, num_allocated_qps=5)
    assert (few.num_allocated_qps, few.get_theoretical_num_qps(20)) == (5, 5)
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)


def test_what_a_buffer_refuses() -> None:
    buffer = deep_ep.ElasticBuffer(ThreadGroup.make(1)[0], MIB2)
    torch_has_it = "expected torch.distributed, whose groups run on CPU ranks too"
    for name in ("engram_write", "pp_recv", "all_gather", "agrs_get_inplace_tensor", "get_pp_buffer_size_hint"):
        method = getattr(deep_ep.ElasticBuffer, name)
        assert (method.__name__, method.__doc__) == (
            name, "Raise InvalidConfig: use torch.distributed, whose groups run on CPU ranks too.",
        )  # fmt: skip
        for call in (method, getattr(buffer, name)):
            assert said(lambda call=call: call(1, a=2)) == f"ElasticBuffer.{name}: got a call, {torch_has_it}"
    with pytest.raises(InvalidConfig) as caught:
        buffer.get_comm_stream()
    expected = "get_comm_stream: got a buffer of CPU ranks, which have no streams; expected no call ("
    assert str(caught.value).startswith(expected)
    with pytest.raises(InvalidInput) as refused:
        buffer.destroy()
    expected = "rank 0: destroy: got explicitly_destroy=False, expected an ElasticBuffer made with "
    assert str(refused.value).startswith(f"{expected}explicitly_destroy=True (")
    ended = deep_ep.ElasticBuffer(ThreadGroup.make(1)[0], MIB2, num_max_tokens_per_rank=8, explicitly_destroy=True)
    job = make_job(1, [6], 64, 3, 4)
    recv_x, _, _, handle, _ = ended.dispatch(job.x[0], job.topk_idx[0], num_experts=4)
    for _ in range(2):
        ended.destroy()
    for op in (ended.barrier, lambda: ended.dispatch(job.x[0], handle=handle), lambda: ended.combine(recv_x, handle)):
        with pytest.raises(GroupClosed) as closed:
            op()
        expected = "rank 0: got an op on a destroyed ElasticBuffer, expected a living one ("
        assert str(closed.value).startswith(expected)


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_handle_keeps(copies: bool) -> None:
    """Its ids are a copy of the caller's if the caller may change them."""

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        options = {"num_sms": 6, "expert_alignment": 4, "num_max_tokens_per_rank": 7, "do_handle_copy": copies}
        recv_x, ids, weights, handle, event = buffer.dispatch(**given(rank, **options))
        assert (handle.topk_idx is JOB.topk_idx[rank]) is not copies
        assert torch.equal(handle.topk_idx, JOB.topk_idx[rank])
        assert (handle.num_sms, handle.expert_alignment, handle.num_max_tokens_per_rank) == (6, 4, 7)
        assert (handle.num_experts, handle.do_expand, event.event) == (4, False, None)
        assert handle.token_metadata_at_forward is handle.channel_linked_list is None
        assert ids.dtype is torch.int64
        assert (handle.recv_src_metadata[:, 2:] == -1).all()
        for name in ("recv_src_metadata", "dst_buffer_slot_idx", "num_unaligned_recv_tokens_per_expert",
                     "psum_num_recv_tokens_per_expert", "psum_num_recv_tokens_per_scaleup_rank"):  # fmt: skip
            assert getattr(handle, name).dtype is torch.int32
        same, _, none, again, event = buffer.dispatch(JOB.x[rank], handle=handle, async_with_compute_stream=True)
        assert torch.equal(same, recv_x)
        assert (none, again) == (None, handle)
        assert event.event is not None
        assert torch.equal(buffer.dispatch(**given(rank, topk_weights=None))[0], recv_x)
        assert buffer.dispatch(**given(rank, topk_weights=None))[2] is None
        assert buffer.dispatch(**given(rank))[3].num_sms == 20
        assert torch.equal(weights, buffer.dispatch(JOB.x[rank], None, JOB.topk_weights[rank], handle=handle)[2])
        out, home, event = buffer.combine(recv_x, handle, async_with_compute_stream=True)
        assert (out.dtype, home, event.event is None) == (torch.bfloat16, None, False)
        assert buffer.combine(recv_x, handle)[2].event is None

    on_two_ranks(make, work)


def test_the_worst_case_has_room_for_every_row() -> None:
    """Each of two ranks may send eight tokens to at most two of three experts; every expert may need padding."""

    def work(buffer: deep_ep.ElasticBuffer, rank: int) -> None:
        for alignment, rows in ((1, 16 * 2), (4, 16 * 2 + 3 * 2), (5, 16 * 2 + 4 * 2)):
            options = {"do_expand": True, "do_cpu_sync": False, "expert_alignment": alignment}
            recv_x, _, weights, handle, _ = buffer.dispatch(**given(rank, **options))
            assert handle.num_expanded_tokens == -(-rows // alignment) * alignment == len(recv_x) == len(weights)
            assert (handle.num_recv_tokens, handle.num_rows) == (16, len(recv_x))
            assert handle.num_recv_tokens_per_expert_list == []

    on_two_ranks(make, work)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_columns_of_scales_begin_at_16_bytes(rows: int) -> None:
    ids = torch.arange(4).expand(rows, 4).contiguous()
    x, scales = zeros(rows, 64, dtype=torch.uint8), torch.rand(rows, 3)
    buffer = make(ThreadGroup.make(1)[0])
    (codes, columns), _, _, _, _ = buffer.dispatch((x, scales), ids, num_experts=4, use_tma_aligned_col_major_sf=True)
    assert torch.equal(columns, scales)
    assert codes.shape == (rows, 64)
    assert columns.stride() == (1, -(-rows // 4) * 4)
    (_, plain), *_ = buffer.dispatch((x, scales), ids, num_experts=4)
    assert plain.is_contiguous()
    assert torch.equal(plain, scales)
