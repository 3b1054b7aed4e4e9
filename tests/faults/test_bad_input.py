"""Bad input is refused on every rank, in the same op, with the value got and expected; the group then continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS
from faults import cases_faults as cases
from support.ranks import Ranks

from moe_rt import Buffer, MoEConfig
from moe_rt.errors import ConcurrentUse, GroupClosed, InvalidConfig

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


BAD_DISPATCH: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # name: changes, class, message of the faulty rank, message of its peers
    "hidden": ({"x": t(4, 21)}, "InvalidInput", "x: got torch.float32 [4, 21]", "got 21, expected 20"),
    "dtype": ({"x": t(4, 20, dtype=torch.float64)}, "InvalidInput", "expected torch.float32 [4, 20]", "rank 1 refused"),
    "x one-dimensional": ({"x": t(20)}, "InvalidInput", "x: got torch.float32 [20]", "rank 1 refused"),
    "x scalar": ({"x": torch.tensor(1.0)}, "InvalidInput", "x: got torch.float32 []", "rank 1 refused"),
    "device": ({"x": torch.zeros(4, 20, device="meta")}, "InvalidInput", "on meta, expected", "rank 1 refused"),
    "idx device": ({"topk_idx": torch.zeros(4, 3, device="meta")}, "InvalidInput", "topk_idx: got", "rank 1 refused"),
    "idx dtype": ({"topk_idx": t(4, 3)}, "InvalidInput", "topk_idx: got torch.float32", "rank 1 refused"),
    "idx shape": ({"topk_idx": t(4, 2, dtype=torch.int64)}, "InvalidInput", "topk_idx: got", "got 2, expected 3"),
    "idx rows": ({"topk_idx": t(5, 3, dtype=torch.int64)}, "InvalidInput", "topk_idx: got", "rank 1 refused"),
    "weights shape": ({"topk_weights": t(4, 1)}, "InvalidInput", "topk_weights: got", "got 1, expected 3"),
    "id too large": (
        {"topk_idx": torch.full((4, 3), 9)},
        "InvalidRouting",
        "got expert id 9",
        "expert id 9 in topk_idx",
    ),
    "id below -1": ({"topk_idx": torch.full((4, 3), -2)}, "InvalidRouting", "expert id -2", "expected -1 or [0, 9)"),
    "id huge": (
        {"topk_idx": torch.full((4, 3), 2**32 + 1)},
        "InvalidRouting",
        "4294967297",
        "got expert id 4294967297",
    ),
    "too many": (
        {"x": t(13, 20), "topk_idx": t(13, 3, dtype=torch.int64), "topk_weights": t(13, 3)},
        "TooManyTokens",
        "got 13 tokens, expected at most num_max_tokens_per_rank = 12",
        "rank 1 got 13 tokens, expected at most 12",
    ),
}


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_dispatch_is_refused_everywhere(make_ranks: MakeRanks, heap: str, name: str) -> None:
    changes, kind, here, elsewhere = BAD_DISPATCH[name]
    texts = make_ranks(heap, SIZE).run(cases.bad_dispatch, FAULTY_RANK, changes)
    for rank, text in enumerate(texts):
        assert text.startswith(kind + ":"), text
        assert (here if rank == FAULTY_RANK else elsewhere) in text


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_the_first_of_two_refusals_is_named_everywhere(make_ranks: MakeRanks, heap: str) -> None:
    for text, peer in make_ranks(heap, SIZE).run(cases.two_bad_dispatches):
        assert "expert id 91" in text
        assert peer == 1


@pytest.mark.parametrize("bad", [{0: 91}, {5: 91}, {11: 91}, {5: 91, 9: 92}], ids=str)
def test_every_thread_s_tokens_are_checked(make_ranks: MakeRanks, bad: dict[int, int]) -> None:
    """Each of three threads has four tokens. The first bad one counts."""
    for texts in make_ranks("shm", SIZE).run(cases.bad_ids_of_threads, bad):
        assert ["expert id 91" in text for text in texts] == [True, True], texts


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize(
    ("name", "value", "here"),
    [
        ("y", t(5, 21), "y: got torch.float32 [5, 21]"),
        ("y", t(200, 20), "y: got 200 rows, expected at most those of recv_weights, 108"),
        ("recv_weights", t(7), "y: got 108 rows, expected at most those of recv_weights, 7"),
        ("recv_weights", t(200), "handle: got plans that no dispatch of this buffer with as many tokens, and as many "),
        ("recv_weights", t(108, 1), "recv_weights: got torch.float32 [108, 1]"),
        ("out", t(5, 20), "out: got torch.float32 [5, 20] on cpu, expected torch.float32 [4, 20]"),
        ("out", t(4, 20, dtype=torch.float64), "out: got torch.float64 [4, 20]"),
        ("out", t(20, 4).t(), "out: got a view that is not contiguous"),
        ("out", torch.imag(torch.zeros(4, 20, dtype=torch.complex64).conj()), "out: got a view that is not"),
        ("out", torch.zeros(4, 20, device="meta"), "out: got torch.float32 [4, 20] on meta"),
        ("out", torch.zeros(4, 20, requires_grad=True), "out: got a combine that gradients are recorded of"),
        ("out", [0.0], "out: got a list, expected a torch.Tensor"),
    ],
)
def test_combine_is_refused_everywhere(
    make_ranks: MakeRanks, heap: str, name: str, value: torch.Tensor, here: str
) -> None:
    texts = make_ranks(heap, SIZE).run(cases.bad_combine, FAULTY_RANK, name, value)
    assert all(text.startswith("InvalidInput:") for text in texts)
    assert here in texts[FAULTY_RANK]
    assert "rank 1 refused its input" in texts[0]


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_views_and_narrow_types_are_accepted(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, SIZE).run(cases.accepts_views)


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 24},
        {"num_topk": 2},
        {"num_experts": 10, "placement": None},
        {"num_max_tokens_per_rank": 13},
        {"dtype": torch.bfloat16},
        {"capacity_factor": 2.0},
        {"overflow": "drop"},
        {"placement": [2, 2, 2, 1, 1, 1, 0, 0, 0]},
    ],
    ids=lambda c: next(iter(c)),
)
def test_ranks_that_disagree_are_refused(make_ranks: MakeRanks, heap: str, changes: dict[str, Any]) -> None:
    field = next(iter(changes))
    for text in make_ranks(heap, SIZE).run(cases.make_differing, FAULTY_RANK, changes):
        assert text.startswith(f"ConfigMismatch: {field}: got"), text
        assert "on rank 1, expected" in text


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 0},
        {"num_topk": 10},
        {"capacity_factor": 0.0},
        {"capacity_factor": float("nan")},
        {"overflow": "maybe"},
        {"timeout_s": 60.0, "init_timeout_s": 0.0},
    ],
    ids=str,
)
def test_nonsense_is_refused_everywhere(make_ranks: MakeRanks, heap: str, changes: dict[str, Any]) -> None:
    field = next(iter(changes))
    texts = make_ranks(heap, SIZE).run(cases.make_differing, FAULTY_RANK, changes)
    assert texts[FAULTY_RANK].startswith(f"InvalidConfig: {field}: got")
    assert texts[0].startswith("InvalidConfig: rank 1 refused its own configuration: " + field)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_overflow_is_raised_everywhere_before_any_row(make_ranks: MakeRanks, heap: str) -> None:
    for text in make_ranks(heap, SIZE).run(cases.overflow):
        assert text.startswith("CapacityOverflow:"), text
        assert "rank 0 would receive 36 rows, expected at most its capacity of 6" in text


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("case", [cases.swapped_layers, cases.swapped_moe_layers, cases.skipped_op, cases.other_handle])
def test_order_of_calls(make_ranks: MakeRanks, heap: str, case: Callable[..., str]) -> None:
    texts = make_ranks(heap, SIZE).run(case, FAULTY_RANK)
    assert any(text.startswith("CallOrderMismatch:") for text in texts), texts
    assert all(text.startswith(("CallOrderMismatch:", "GroupPoisoned:")) for text in texts), texts


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_use_after_close(make_ranks: MakeRanks, heap: str) -> None:
    for text in make_ranks(heap, SIZE).run(cases.use_after_close):
        assert text.startswith("GroupClosed:")


def test_second_thread_is_refused(make_ranks: MakeRanks) -> None:
    texts = make_ranks("shm", 2).run(cases.two_threads)
    assert texts[1][0].startswith(ConcurrentUse.__name__)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_close_during_an_op_is_reported(make_ranks: MakeRanks, heap: str) -> None:
    """An op that waits while its buffer closes raises GroupClosed, and its memory exists until it ends."""
    assert make_ranks(heap, 2).run(cases.close_during_op) == ["GroupClosed"] * 2


def test_gone_buffer_is_reported() -> None:
    kwargs: dict[str, Any] = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)
    with Buffer(None, **kwargs) as buffer:
        recv_x, recv_weights, handle = buffer.dispatch(
            torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        )
        engine = buffer._engine.id
    del buffer
    with pytest.raises(GroupClosed, match="no longer exists"):
        torch.ops.moe_rt.combine(recv_x, recv_weights, handle.recv_plan, handle.send_plan, engine, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heap": "nvshmem"}, "heap: got"),
        ({"timeout_s": 0.0}, "timeout_s: got"),
        ({"num_threads": 0}, "num_threads: got 0"),
        ({"placement": [0, 0]}, "placement: got 2 entries, expected num_experts = 4"),
        ({"placement": [0, 0, 0, 1]}, "placement: got"),
        ({"dtype": torch.int32}, "dtype: got torch.int32"),
        ({"num_max_tokens_per_rank": 2**30, "num_topk": 2}, "got 2147483648 rows"),
        ({"group": "ep"}, "group: got str"),
    ],
)
def test_config_errors_say_got_and_expected(changes: dict[str, Any], message: str) -> None:
    kwargs: dict[str, Any] = dict(
        group=None, num_max_tokens_per_rank=4, hidden=8, num_topk=1, num_experts=4, dtype=torch.float32
    )
    with pytest.raises(InvalidConfig, match=message):
        Buffer(**{**kwargs, **changes})


def test_layer_config_errors() -> None:
    kwargs: dict[str, Any] = dict(hidden=8, intermediate=4, num_experts=4, num_topk=1, num_max_tokens_per_rank=4)
    with pytest.raises(InvalidConfig, match="intermediate: got 0"):
        MoEConfig(**{**kwargs, "intermediate": 0})
    with pytest.raises(InvalidConfig, match="score_func: got"):
        MoEConfig(**{**kwargs, "score_func": "tanh"})
