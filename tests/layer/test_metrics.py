"""A layer counts its router's choices, dropped rows, forwards, and the time it waited for each peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer import cases_metrics as cases
from layer.cases_layer import config, inputs_for
from support.ranks import Ranks

from moe_rt import MoELayer
from moe_rt.nn import metrics
from moe_rt.nn.metrics import LayerMetrics

MakeRanks = Callable[[str, int], Ranks]
BUFFERS: Any = SimpleNamespace(
    current=SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(overflow="drop"))
)


def test_counts_add_up(make_ranks: MakeRanks) -> None:
    for snapshot, expected in make_ranks("shm", 2).run(cases.counted):
        assert snapshot.tokens_per_expert == expected
        assert sum(expected) == 2 * 10 * cases.TOPK
        assert (snapshot.forwards, snapshot.rows_dropped) == (2, 0)


@pytest.mark.parametrize("num_chunks", cases.LOST)
def test_dropped_rows_are_counted(make_ranks: MakeRanks, num_chunks: int) -> None:
    """Rows dropped at rank 0 are counted: it gets all tokens of both ranks, and has capacity for a part."""
    assert make_ranks("shm", 2).run(cases.dropped, num_chunks) == [(2 * cases.LOST[num_chunks], 2), (0, 2)]


def test_counts_of_a_layer_that_was_made_in_inference_mode() -> None:
    """A layer made in inference mode counts outside of it, where tensors made in that mode cannot change."""
    with torch.inference_mode():
        layer = MoELayer(config())
    with torch.no_grad():
        layer(inputs_for(0, 4))
    assert layer.metrics.snapshot().forwards == 1


def test_waits_of_all_dtypes_add_up() -> None:
    layer = MoELayer(config())
    waits: dict[Any, Any] = {torch.float32: [1, 2], torch.bfloat16: [10, 20]}
    layer._shared_buffers._by_dtype = {
        dtype: SimpleNamespace(waited_ns=lambda ns=ns: ns) for dtype, ns in waits.items()
    }
    assert layer.metrics.snapshot().waited_ns == [11, 22]


def test_counts_change_only_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may run one layer."""
    counts = LayerMetrics(2, BUFFERS)
    seen: list[tuple[int, int]] = []

    class Lock:
        def __enter__(self) -> None:
            seen.append((int(counts._forwards), int(counts._dropped)))

        def __exit__(self, *raised: object) -> None:
            seen.append((int(counts._forwards), int(counts._dropped)))

    monkeypatch.setattr(metrics, "_adding", Lock())
    counts.add(torch.ones(2, dtype=torch.int64), SimpleNamespace(offs=torch.ones(1), num_dropped=3))  # type: ignore[arg-type]
    assert seen == [(0, 0), (1, 0), (1, 0), (1, 3)]


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": torch.func.vjp,
    "vmap": lambda f, x: torch.vmap(f)(x.unsqueeze(0)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tensors_of_a_transform_are_not_counted(transform: str) -> None:
    layer = MoELayer(config())
    counts = torch.ones(layer.config.num_experts)

    def add(x: torch.Tensor) -> torch.Tensor:
        layer.metrics.add((x > 0).long())
        return x.sum()

    TRANSFORMS[transform](add, counts)
    assert layer.metrics.snapshot().forwards == 0
    layer.metrics.add(counts.long())
    assert layer.metrics.snapshot().tokens_per_expert == [1] * layer.config.num_experts


@pytest.mark.parametrize("late", [0, 1])
def test_waiting_is_charged_to_the_late_peer(make_ranks: MakeRanks, late: int) -> None:
    """The late peer is charged, and the peers that are waited for after it are not charged again."""
    began = time.monotonic_ns()
    waited = make_ranks("shm", 2).run(cases.one_rank_is_late, late)[1 - late]
    assert 0.5e9 * cases.LATE_S < waited[late] < time.monotonic_ns() - began, "a busy machine adds to it"
    assert waited[1 - late] < 0.2 * waited[late]
