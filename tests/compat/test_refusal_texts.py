"""Refusals of deep_ep's normal mode name what was got and expected, for every condition of an operand.

Every rank calls wrongly here; test_refusals.py has what peers raise when one rank does.
"""

from __future__ import annotations

from typing import Any

import torch
from compat.oracle import make_job
from compat.test_normal import BYTES, dispatch, layout_arguments
from compat.texts import Cases, across, check, f32, on_two_ranks, zeros
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep import operands

JOB = make_job(2, [6, 6], 128, 3, 4)
COUNTS = ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")
NO_TOPK = {"topk_idx": None, "topk_weights": None}
ROWS = "expected contiguous bfloat16 [{0}, H], or a tuple of codes [{0}, H] and scales, rows of 16 n bytes"
LAYOUT = "expected contiguous torch.{} [{}] on cpu"
FOREIGN = "handle: got another buffer's, or a copy of its items, expected one that this buffer's dispatch returned"
TWICE = "topk_idx: got an expert twice for a token, expected different experts; sum their weights first"


# Rows that dispatch takes; and others, with what the error says that it got.
GOOD_ROWS = [zeros(4, 8), zeros(0, 8), (zeros(4, 16, dtype=torch.uint8), zeros(4, 1, dtype=f32)),
             (zeros(4, 16, dtype=torch.float8_e4m3fn), across(4, 3, dtype=torch.int32))]  # fmt: skip
BAD_ROWS: list[tuple[Any, str]] = [
    ([1], "list"),
    (zeros(4), "torch.bfloat16 [4]"),
    (zeros(4, 8, 2), "torch.bfloat16 [4, 8, 2]"),
    (across(4, 8), "torch.bfloat16 [4, 8], not contiguous"),
    (zeros(4, 8, dtype=torch.float16), "torch.float16 [4, 8]"),
    (zeros(4, 16, dtype=torch.uint8), "torch.uint8 [4, 16]"),
    (zeros(4, 4), "torch.bfloat16 [4, 4]"),
    (zeros(4, 12), "torch.bfloat16 [4, 12]"),
    (zeros(4, 8).to("meta"), ""),
    ((zeros(4, 8), zeros(4, 1, dtype=f32)), "torch.bfloat16 [4, 8]"),
    ((zeros(4, 8, dtype=torch.uint8), zeros(4, 1, dtype=f32)), "torch.uint8 [4, 8]"),
    ((zeros(4, 8), zeros(4, 1), zeros(4, 1)), "tuple"),
    ([zeros(4, 16, dtype=torch.uint8), zeros(4, 1, dtype=f32)], "list"),
]
BAD_SCALES: list[tuple[Any, str]] = [
    (1.0, "float"),
    (zeros(4, dtype=f32), "torch.float32 [4]"),
    (zeros(3, 1, dtype=f32), "torch.float32 [3, 1]"),
    (zeros(4, 1, dtype=torch.float64), "torch.float64 [4, 1]"),
    (zeros(4, 1), "torch.bfloat16 [4, 1]"),
    (zeros(4, 1, dtype=f32).to("meta"), "torch.float32 [4, 1] on meta"),
]


def test_rows() -> None:
    for x in GOOD_ROWS:
        assert operands.wrong_rows(3, x) is None
        assert operands.wrong_rows(3, x, len(x[0] if isinstance(x, tuple) else x)) is None
    rows = "contiguous bfloat16 [{0}, H], or a tuple of codes [{0}, H] and scales, rows of 16 n bytes"
    for x, got in BAD_ROWS:
        error = operands.wrong_rows(3, x)
        text = f"rank 3: x: got {got}, expected {rows.format('T')}" if got else ""
        assert (str(error).rpartition(" (")[0] if error else "") == text
    error = operands.wrong_rows(3, zeros(4, 8), 5)
    assert str(error).startswith(f"rank 3: x: got torch.bfloat16 [4, 8], expected {rows.format(5)} (")
    codes = zeros(4, 16, dtype=torch.uint8)
    for scales, got in BAD_SCALES:
        text = f"rank 3: x: got {got}, expected scales of float32 or int32 [4, S] on cpu ("
        assert str(operands.wrong_rows(3, (codes, scales))).startswith(text)


def test_a_tensor_has_a_dtype_a_shape_a_device_and_rows() -> None:
    like, right = zeros(1), zeros(4, 2, dtype=f32)
    assert operands.wrong_tensor(3, "bias", right, f32, (4, 2), like) is None
    wrong = {
        "list": [1],
        "torch.bfloat16 [4, 2]": zeros(4, 2),
        "torch.float32 [4, 3]": zeros(4, 3, dtype=f32),
        "torch.float32 [2, 4]": zeros(2, 4, dtype=f32),
        "torch.float32 [8]": zeros(8, dtype=f32),
        "torch.float32 [4, 2], not contiguous": across(4, 2, dtype=f32),
        "torch.float32 [4, 2] on meta": right.to("meta"),
    }
    for got, t in wrong.items():
        error = operands.wrong_tensor(3, "bias", t, f32, (4, 2), like)
        assert error is not None
        assert error.rank == 3
        assert str(error).startswith(f"rank 3: bias: got {got}, expected contiguous torch.float32 [4, 2] on cpu (")
    assert operands.wrong_ids(3, zeros(4, 2, dtype=torch.int64), 4, like) is None
    for ids, got, k in ((None, "NoneType", "K"), (zeros(4, dtype=torch.int64), "torch.int64 [4]", "K"),
                        (zeros(4, 2, dtype=torch.int32), "torch.int32 [4, 2]", "2"),
                        (zeros(5, 2, dtype=torch.int64), "torch.int64 [5, 2]", "2")):  # fmt: skip
        text = f"rank 3: topk_idx: got {got}, expected contiguous torch.int64 [4, {k}] on cpu ("
        assert str(operands.wrong_ids(3, ids, 4, like)).startswith(text)
    error = operands.twice(5)
    assert (error.rank, str(error).partition(" (moe-rt")[0]) == (5, f"rank 5: {TWICE}")


def make(group: ThreadGroup) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, BYTES, timeout_s=CASE_TIMEOUT_S)


def given(buffer: deep_ep.Buffer, rank: int) -> dict[str, Any]:
    """Return the arguments of a right dispatch."""
    routing = {"topk_idx": JOB.topk_idx[rank], "topk_weights": JOB.topk_weights[rank]}
    return layout_arguments(buffer, JOB, rank) | routing | {"x": JOB.x[rank]}


def test_rows_ids_and_weights_of_dispatch() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        right, weights = given(buffer, rank), JOB.topk_weights[rank]
        narrow = weights[:, :2].contiguous()
        twice = JOB.topk_idx[rank].clone()
        twice[0] = torch.tensor([2, 2, 2])
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(twice, 4)
        of_twice = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        both = "expected both topk_idx and topk_weights, or neither"
        cases: Cases = [
            ({"x": JOB.x[rank].float()}, f"x: got torch.float32 [6, 128], {ROWS.format(6)}"),
            ({"x": None}, f"x: got NoneType, {ROWS.format(-1)}"),
            ({"x": zeros()}, f"x: got torch.bfloat16 [], {ROWS.format(-1)}"),
            ({"x": JOB.x[rank][:5]}, f"is_token_in_rank: got torch.bool [6, 2], {LAYOUT.format('bool', '5, 2')}"),
            ({"topk_weights": None}, f"topk_weights: got NoneType, {both}"),
            ({"topk_idx": None}, f"topk_weights: got torch.float32 [6, 3], {both}"),
            (
                {"topk_idx": JOB.topk_idx[rank].int()},
                f"topk_idx: got torch.int32 [6, 3], {LAYOUT.format('int64', '6, 3')}",
            ),
            (
                {"topk_weights": weights.double()},
                f"topk_weights: got torch.float64 [6, 3], {LAYOUT.format('float32', '6, 3')}",
            ),
            ({"topk_weights": narrow}, f"topk_weights: got torch.float32 [6, 2], {LAYOUT.format('float32', '6, 3')}"),
            (
                {**NO_TOPK, "num_worst_tokens": 12},
                "num_worst_tokens: got 12, expected topk_idx and topk_weights with it",
            ),
            ({"num_worst_tokens": 1}, "num_worst_tokens: got 1, expected at least the number of received tokens"),
            ({"topk_idx": twice, **of_twice}, TWICE),
        ]
        check(rank, buffer.dispatch, right, cases)

    on_two_ranks(make, work)


def test_the_layout_of_dispatch() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        right = given(buffer, rank)
        per_rank, per_expert, in_rank = (right[name].clone() for name in COUNTS)
        swapped = per_expert.clone()
        swapped[:2] += torch.tensor([1, -1], dtype=torch.int32)
        ranks, experts, visits = COUNTS
        sums = f"{ranks}: got {(per_rank + 1).tolist()}, expected {per_rank.tolist()}, the columns' sums of {visits}"
        multiple = "experts, expected a multiple of 2 ranks"
        cases: Cases = [
            ({ranks: per_rank + 1}, sums),
            ({**NO_TOPK, ranks: per_rank + 1}, sums),
            ({ranks: per_rank.long()}, f"{ranks}: got torch.int64 [2], {LAYOUT.format('int32', '2')}"),
            ({ranks: zeros(3, dtype=torch.int32)}, f"{ranks}: got torch.int32 [3], {LAYOUT.format('int32', '2')}"),
            ({experts: per_expert.long()}, f"{experts}: got torch.int64 [4], {LAYOUT.format('int32', '4')}"),
            ({experts: None}, f"{experts}: got NoneType, {LAYOUT.format('int32', '0')}"),
            ({experts: per_expert[:0]}, f"{experts}: got 0 {multiple}"),
            ({experts: per_expert[:3].clone()}, f"{experts}: got 3 {multiple}"),
            ({experts: swapped}, f"{experts}: got another routing's, expected that of topk_idx"),
            ({visits: in_rank.byte()}, f"{visits}: got torch.uint8 [6, 2], {LAYOUT.format('bool', '6, 2')}"),
            (
                {visits: ~in_rank, ranks: (~in_rank).sum(0).int()},
                f"{visits}: got another routing's, expected that of topk_idx (get_dispatch_layout)",
            ),
        ]
        check(rank, buffer.dispatch, right, cases)

    on_two_ranks(make, work)


def test_the_handle_of_dispatch() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        right = given(buffer, rank)
        handle, foreign = buffer.dispatch(**right)[4], dispatch(make(buffer.group), JOB, rank)[4]
        expected = "expected that of a dispatch, without topk_idx and topk_weights"
        cases: Cases = [
            ({"handle": foreign, **NO_TOPK}, FOREIGN),
            ({"handle": (1,), **NO_TOPK}, f"handle: got tuple, {expected}"),
            ({"handle": handle, "topk_weights": None}, f"handle: got DispatchHandle, {expected}"),
            ({"handle": handle, "topk_idx": None}, f"handle: got DispatchHandle, {expected}"),
            (
                {"handle": handle, "x": JOB.x[rank][:5], **NO_TOPK},
                f"x: got torch.bfloat16 [5, 128], {ROWS.format(6)}",
            ),
            ({"handle": handle, **NO_TOPK}, ""),
        ]
        check(rank, buffer.dispatch, right, cases)

    on_two_ranks(make, work)


def test_combine() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, weights, _, handle, _ = dispatch(buffer, JOB, rank)
        n, bias = len(recv_x), JOB.x[rank]
        rows, wide = f"expected contiguous bfloat16 [{n}, 'H']", f"expected bfloat16 [{n}, 'H'], H a multiple of 8"
        entries, biases = f"expected contiguous float32 [{n}, 'K']", "expected torch.bfloat16 [6, 128]"
        columns = across(n, 3, dtype=f32)
        cases: Cases = [
            ({"handle": tuple(handle)}, FOREIGN),
            ({"x": [1]}, f"x: got list, {rows}"),
            ({"x": recv_x.float()}, f"x: got torch.float32 [{n}, 128], {rows}"),
            ({"x": recv_x.flatten()}, f"x: got torch.bfloat16 [{n * 128}], {rows}"),
            ({"x": across(n, 128)}, f"x: got torch.bfloat16 [{n}, 128], not contiguous, {rows}"),
            ({"x": recv_x[1:]}, f"x: got torch.bfloat16 [{n - 1}, 128], {wide}"),
            ({"x": zeros(n, 12), "bias": None}, f"x: got torch.bfloat16 [{n}, 12], {wide}"),
            ({"topk_weights": weights.double()}, f"topk_weights: got torch.float64 [{n}, 3], {entries}"),
            ({"topk_weights": weights.flatten()}, f"topk_weights: got torch.float32 [{3 * n}], {entries}"),
            ({"topk_weights": weights[1:]}, f"topk_weights: got torch.float32 [{n - 1}, 3], {entries}"),
            ({"topk_weights": columns}, f"topk_weights: got torch.float32 [{n}, 3], not contiguous, {entries}"),
            ({"topk_weights": [1]}, f"topk_weights: got list, {entries}"),
            ({"bias": bias.float()}, f"bias: got torch.float32 [6, 128], {biases}"),
            ({"bias": bias[:, 1:]}, f"bias: got torch.bfloat16 [6, 127], not contiguous, {biases}"),
            ({"bias": bias[1:]}, f"bias: got torch.bfloat16 [5, 128], {biases}"),
            ({"bias": (bias, 1.0)}, f"bias: got float, {biases}"),
        ]
        check(rank, buffer.combine, {"x": recv_x, "handle": handle, "topk_weights": weights, "bias": bias}, cases)

    on_two_ranks(make, work)
