"""deep_ep's helpers against loops over single numbers: casts, hashes, scores, sums in order, events and timers."""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_rt.compat.deep_ep.utils import envs, refs, testing
from moe_rt.compat.deep_ep.utils import math as helpers
from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap, event_of
from moe_rt.compat.deep_ep.utils.gate import get_unbalanced_scores
from moe_rt.errors import InvalidInput


def test_a_difference_is_one_minus_the_similarity() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 3).bfloat16(), torch.randn(5, 3)
    pairs = [(a + 1, b + 1) for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)]
    right = 1 - 2 * sum(a * b for a, b in pairs) / sum(a * a + b * b for a, b in pairs)
    assert helpers.calc_diff(x, y) == pytest.approx(right, abs=1e-12)
    assert helpers.calc_diff(x, x) == 0.0


def test_divisions() -> None:
    assert [helpers.safe_div(a, b) for a, b in ((0, 0), (0, 4), (6, 4), (-1, 4))] == [0.0, 0.0, 1.5, -0.25]
    with pytest.raises(ZeroDivisionError):
        helpers.safe_div(1, 0)
    for x in range(20):
        for y in range(1, 7):
            assert helpers.ceil_div(x, y) == math.ceil(x / y)
            assert helpers.align(x, y) == next(number for number in range(x, x + y) if number % y == 0)


@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
def test_a_cast_to_fp8_has_a_scale_for_each_block(hidden: int) -> None:
    torch.manual_seed(hidden)
    x = (torch.randn(4, hidden) * torch.tensor([[1.0], [1e-6], [300.0], [0.0]])).bfloat16()
    codes, scales = helpers.per_token_cast_to_fp8(x)
    assert (codes.dtype, codes.shape, scales.dtype) == (torch.float8_e4m3fn, x.shape, torch.float32)
    assert scales.shape == (4, math.ceil(hidden / 128))
    assert codes.is_contiguous()
    for token in range(4):
        for block in range(scales.shape[1]):
            own = slice(128 * block, 128 * (block + 1))
            amax = max(x[token, own].float().abs().max(), torch.tensor(1e-4))
            assert scales[token, block] == amax / 448
            assert torch.equal(
                codes[token, own].float(), (x[token, own].float() * (448 / amax)).to(codes.dtype).float()
            )


@pytest.mark.parametrize("exponents", [False, True], ids=["float32", "ue8m0"])
@pytest.mark.parametrize("hidden", [512, 1024])
def test_codes_are_cast_back_with_their_own_scales(hidden: int, exponents: bool) -> None:
    torch.manual_seed(hidden)
    codes, numbers = torch.randn(3, hidden).to(torch.float8_e4m3fn), torch.randint(120, 134, (3, hidden // 128))
    factors = torch.exp2(numbers.float() - 127)
    given = numbers.to(torch.uint8).view(torch.int32) if exponents else factors
    for scales in (given, given.T.contiguous().T):
        back = helpers.per_token_cast_back(codes, scales)
        assert (back.dtype, back.is_contiguous()) == (torch.bfloat16, True)
        assert torch.equal(back, (codes.float() * factors.repeat_interleave(128, 1)).bfloat16())


def test_codes_of_part_of_a_block_and_none() -> None:
    x = torch.randn(3, 200).bfloat16()
    back = helpers.per_token_cast_back(*helpers.per_token_cast_to_fp8(x))
    assert back.is_contiguous()
    assert torch.allclose(back.float(), x.float(), rtol=2**-4, atol=2**-6)
    none = helpers.per_token_cast_back(torch.zeros(0, 200, dtype=torch.float8_e4m3fn), torch.zeros(0, 2))
    assert (none.shape, none.dtype) == ((0, 200), torch.bfloat16)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_rows_keep_their_different_values(width: int) -> None:
    x = torch.randint(-3, 4, (50, width), generator=torch.Generator().manual_seed(width))
    expected = []
    for row in x.tolist():
        values = sorted({value for value in row if value >= 0}, reverse=True)
        expected.append(values + [-1] * (width - len(values)))
    helpers.inplace_unique(x, 4)
    assert x.tolist() == expected


def test_hashes_and_bytes() -> None:
    a, b = torch.randn(3, 2), torch.tensor([1, -2, 1 << 40])
    words = {id(t): struct.unpack(f"<{t.nbytes // 4}i", t.numpy().tobytes()) for t in (a, b)}
    assert [helpers.hash_tensor(t) for t in (a, b)] == [sum(words[id(t)]) for t in (a, b)]
    one, other = helpers.hash_tensor(a), helpers.hash_tensor(b)
    assert helpers.hash_tensors() == helpers.hash_tensors(None, 5) == 0
    assert helpers.hash_tensors(a, None, (b, [a])) == other
    assert helpers.hash_tensors(a, [b]) == one ^ other
    assert helpers.count_bytes(a, None, (b, [a, None])) == 2 * 24 + 24
    assert helpers.count_bytes() == 0


def test_scores_of_groups_that_are_not_named_are_zero() -> None:
    scores, groups = torch.rand(6, 12), torch.rand(6, 4).topk(2).indices
    got = helpers.create_grouped_scores(scores, groups, 4)
    for token in range(6):
        for expert in range(12):
            assert got[token, expert] == (scores[token, expert] if expert // 3 in groups[token].tolist() else 0)


def visits_of(scores: torch.Tensor, num_topk: int, num_ranks: int) -> torch.Tensor:
    """Return bool [T, R]: True if one of a token's K largest scores is of the rank."""
    ranks = scores.topk(num_topk).indices // (scores.shape[1] // num_ranks)
    return torch.stack([(ranks == rank).any(1) for rank in range(num_ranks)], 1)


@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "num_topk", "ratio"),
    [
        *((4, 4, 1, ratio) for ratio in (1.0, 2.0, 5.0)),
        *((8, 2, 4, ratio) for ratio in (1.0, 1.75, 1.76, 3.5, 3.6, 7.0, 20.0)),
        *((4, 3, 6, ratio) for ratio in (1.0, 1.5, 2.0, 3.0, 3.1)),
        *((2, 4, 6, ratio) for ratio in (1.0, 3.0)),
        (4, 3, 12, 1.0),
    ],
)
def test_precise_scores_send_a_share_to_each_rank(num_ranks: int, per_rank: int, num_topk: int, ratio: float) -> None:
    """A token visits as few ranks as the ratio demands; rank 0 has its share, and the others take turns."""
    num_tokens = 500
    torch.manual_seed(0)
    scores = get_unbalanced_scores(num_tokens, num_ranks * per_rank, num_ranks, num_topk, ratio, True)
    assert (scores.dtype, scores.shape) == (torch.float32, (num_tokens, num_ranks * per_rank))
    chosen = scores > 0.9
    assert (chosen.sum(1) == num_topk).all()
    assert 0.99 < scores.max() <= 1.0
    assert 0.9 < scores[chosen].min() < 0.91
    if num_topk < num_ranks * per_rank:
        assert 0 <= scores[~chosen].min() < 0.01
        assert scores[~chosen].max() > 0.89
    visited = visits_of(scores, num_topk, num_ranks)
    fewest = min(num_topk, num_ranks, max(int((num_ranks - 1) / ratio) + 1, math.ceil(num_topk / per_rank)))
    assert (visited.sum(1) == fewest).all()
    counts = visited.sum(0).tolist()
    share = ratio / (num_ranks - 1 + ratio)
    first = num_tokens if fewest == num_ranks else min(num_tokens, round(num_tokens * fewest * share))
    assert counts[0] == first
    assert max(counts[1:]) - min(counts[1:]) <= 1
    assert sum(counts) == num_tokens * fewest
    if 0 < first < num_tokens:  # tokens of rank 0 are not the first ones
        assert not visited[:first, 0].all()
    for place in range(per_rank):  # any expert of a rank is chosen
        assert chosen[:, place::per_rank].any()
    ranks = chosen.view(num_tokens, num_ranks, per_rank).sum(2)
    assert (ranks.max(1).values == min(per_rank, 1 + num_topk - fewest)).all()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("precise", [True, False])
def test_scores_are_fp32_under_any_default(default: torch.dtype, precise: bool) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(default)
    try:
        scores = get_unbalanced_scores(50, 12, 4, 3, 2.0, precise)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.dtype is torch.float32
    assert len(scores.unique()) == scores.numel(), "bf16 would make many equal"


def test_scores_of_ratio_one_are_any_scores() -> None:
    torch.manual_seed(3)
    scores = get_unbalanced_scores(7, 12, 4, 3, 1.0, False)
    torch.manual_seed(3)
    assert torch.equal(scores, torch.rand(7, 12))


@pytest.mark.parametrize(("num_ranks", "num_topk", "ratio"), [(4, 2, 1.1), (4, 4, 2.0), (8, 2, 3.0), (8, 1, 6.0)])
def test_scores_of_the_first_rank_are_raised_until_the_ratio_fits(num_ranks: int, num_topk: int, ratio: float) -> None:
    torch.manual_seed(1)
    scores = get_unbalanced_scores(8000, 4 * num_ranks, num_ranks, num_topk, ratio, False)
    assert scores.dtype is torch.float32
    assert scores.min() >= 0
    assert scores[:, 4:].max() < 1 < scores[:, :4].max()
    counts = visits_of(scores, num_topk, num_ranks).sum(0).float()
    assert float(counts[0] / counts[1:].mean()) == pytest.approx(ratio, rel=0.06)


def test_a_sum_in_order_is_rounded_once() -> None:
    data = torch.tensor([[[2.0**30], [1.0], [-(2.0**30)]], [[2.0**30], [-(2.0**30)], [1.0]]]).bfloat16()
    total = refs.ordered_accumulate(data)
    assert (total.dtype, total.tolist()) == (torch.bfloat16, [[0.0], [1.0]])
    for dtype in (torch.float32, torch.bfloat16):
        first = torch.tensor([[1.0], [2.0]], dtype=dtype)
        assert refs.ordered_accumulate(data, first).tolist() == [[0.0], [1.0]]
        assert first.tolist() == [[1.0], [2.0]]  # it is not written
    small = torch.full((1, 4, 1), 2.0**-9).bfloat16()
    assert refs.ordered_accumulate(small, torch.ones(1, 1).bfloat16()).tolist() == [[1 + 2.0**-7]]


@pytest.mark.parametrize("in_scaleup", [False, True])
@pytest.mark.parametrize("in_local", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_sums_of_ranks_and_of_domains_stand_at_their_last_entries(
    number: int, in_local: bool, in_scaleup: bool
) -> None:
    """Two domains of two ranks with three experts each."""
    draw = torch.Generator().manual_seed(number)
    ids = torch.rand(9, 12, generator=draw).argsort(1)[:, :5]
    y = torch.randn(9, 5, 8, generator=draw).bfloat16()
    bias = tuple(torch.randn(9, 8, generator=draw).bfloat16() for _ in range(number))
    given: Any = bias if number == 2 else bias[0] if bias else None
    out = refs.combine(y, ids, 2, 2, 12, given, in_local, in_scaleup)
    for token, experts in enumerate(ids.tolist()):
        rows = [(expert, row.float()) for expert, row in zip(experts, y[token], strict=True)]
        for experts_of_a_group in [*([3] if in_local else []), *([6] if in_scaleup else [])]:
            groups = [expert // experts_of_a_group for expert, _ in rows]
            sums = {group: torch.zeros(8) for group in groups}
            for group, (_, row) in zip(groups, rows, strict=True):
                sums[group] += row
            last = {group: place for place, group in enumerate(groups)}
            rows = [
                (expert, sums[group].bfloat16().float() if last[group] == place else torch.zeros(8))
                for place, (group, (expert, _)) in enumerate(zip(groups, rows, strict=True))
            ]
        total = sum((part[token].float() for part in bias), torch.zeros(8))
        for _, row in rows:
            total = total + row
        assert torch.equal(out[token], total.bfloat16())


def test_rows_to_combine_follow_from_the_number_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(envs, "_seeds", {"local": 9, "global": 5})
    rows = refs.generate_pre_combine_data(torch.tensor([0, 3, 37], dtype=torch.int32), 16, 3, 6)
    assert (rows.dtype, rows.shape) == (torch.bfloat16, (3, 3, 6))
    for place, token in enumerate((0, 3, 37)):
        for k in range(3):
            frequency = ((token * 3 + k) * 131071 % 192 + 1) / 192
            right = [math.sin(frequency * column + math.sin(5)) for column in range(1, 7)]
            assert torch.allclose(rows[place, k].float(), torch.tensor(right), rtol=2**-8, atol=2**-12)


def test_an_event_without_an_op() -> None:
    with pytest.raises(InvalidInput) as caught:
        EventOverlap().current_stream_wait()
    expected = "current_stream_wait: got an op without an event, expected async_finish=True in its call"
    assert str(caught.value).startswith(f"{expected} (")
    with EventOverlap() as nothing:  # as programs use the result of any op
        assert nothing.event is None
    event = EventOverlap(EventHandle(), ("kept",))
    assert event.extra_tensors == ("kept",)
    event.register_hook_after_wait(int)
    with pytest.raises(InvalidInput, match=r"^register_hook_after_wait: got a second hook, expected one "):
        event.register_hook_after_wait(int)


def test_a_release_is_of_one_block() -> None:
    event = EventOverlap(EventHandle())
    assert event(release_handle=True) is event
    with event(release_handle=False):
        pass
    assert event.event is not None
    with event(release_handle=True) as entered:
        assert entered is event
    assert event.event is None


def test_events_of_a_gpu_are_of_the_device_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stream = SimpleNamespace(record_event=lambda: "event", wait_event=lambda event: calls.append(("waits", event)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: (calls.append(device), stream)[1])
    gpu = torch.device("cuda", 1)
    for result in (SimpleNamespace(device=gpu), (SimpleNamespace(device=gpu), torch.zeros(1))):
        calls.clear()
        event_of(True, result).current_stream_wait()
        assert calls == [gpu, None, ("waits", "event")]
    calls.clear()
    assert event_of(False, SimpleNamespace(device=gpu)).event is None
    event_of(True, torch.zeros(1)).current_stream_wait()
    EventHandle().current_stream_wait()
    assert calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    EventHandle().current_stream_wait()
    assert calls == [None, None, ("waits", "event")]


@pytest.mark.parametrize(
    ("warmups", "tests", "warmed", "timed"), [(50, 50, 3, 10), (0, 1, 0, 1), (3, 10, 3, 10), (2, 9, 2, 9)]
)
def test_a_timer_calls_a_few_times(
    monkeypatch: pytest.MonkeyPatch, warmups: int, tests: int, warmed: int, timed: int
) -> None:
    """The first timed call does not count, unless it is the only one."""
    now, calls = [0.0], Counter[str]()

    def call() -> None:
        calls["call"] += 1
        now[0] += calls["call"]

    def after() -> None:
        calls["after"] += 1
        now[0] += 1000

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    seconds = list(range(warmed + 1, warmed + timed + 1))
    seconds = seconds[1:] or seconds
    assert testing.bench(call, warmups, tests, after) == (sum(seconds) / len(seconds), seconds[0], seconds[-1])
    assert calls == {"call": warmed + timed, "after": timed}
    assert testing.bench(call, 0, 1)[0] == calls["call"]
    testing.flush_l2_cache()


def test_a_kernel_has_the_time_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now, barriers = [0.0], list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append("of all"))

    def call() -> None:
        now[0] += 2.0

    assert testing.bench_kineto(call, "kernel") == 2.0
    assert now[0] == 2.0
    assert testing.bench_kineto(call, ("a", "b")) == [2.0, 2.0]
    assert testing.bench_kineto(call, "kernel", num_kernels_per_period=3) == [2.0] * 3
    assert testing.bench_kineto(call, ("a", "b"), num_kernels_per_period=2) == [[2.0] * 2] * 2
    assert barriers == []
    testing.bench_kineto(call, "kernel", barrier_comm_profiling=True)
    testing.bench_kineto(call, "kernel", barrier_comm_profiling=True, barrier=lambda: barriers.append("given"))
    assert barriers == ["of all", "given"]


def test_speeds_of_links_are_unknown() -> None:
    assert (envs.get_nvlink_gbs(), envs.get_rdma_gbs(), envs.check_fast_rdma_atomic_support()) == (0.0, 0.0, False)
    group: Any = SimpleNamespace(size=lambda: 3)
    assert envs.get_physical_domain_size(group) == envs.get_logical_domain_size(group) == (1, 3)
