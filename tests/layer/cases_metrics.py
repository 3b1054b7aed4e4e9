"""Functions that ranks run in the tests of metrics."""

from __future__ import annotations

import time
from typing import Any

import torch
from layer.cases_layer import TOKENS, TOPK, config, inputs_for

from moe_rt import MoELayer
from moe_rt.nn.metrics import MetricsSnapshot

LATE_S = 1.0
# Both ranks send 10 tokens to an expert of rank 0, whose capacity is a quarter of a balanced load's 2 * 10 * 3 / 2.
# Three chunks hold 2, 5 and 3 of these tokens, and have a bound of 3, 5 and 3. The keys are numbers of chunks.
LOST = {1: 20 - 8, 3: (4 - 3) + (10 - 4) + (6 - 3)}

__all__ = ["LATE_S", "LOST", "TOPK", "counted", "dropped", "one_rank_is_late"]


def counted(group: Any) -> tuple[MetricsSnapshot, list[int]]:
    """Return the snapshot after two forwards, and the sum of the router's counts."""
    layer = MoELayer(config(), group)
    reported = sum(layer(inputs_for(step, TOKENS))[1].tokens_per_expert for step in range(2))
    snapshot = layer.metrics.snapshot()
    layer.buffer.close()
    return snapshot, reported.tolist()


def dropped(group: Any, num_chunks: int) -> tuple[int, int]:
    options = {"capacity_factor": 0.25, "overflow": "drop", "num_chunks": num_chunks}
    layer = MoELayer(config(num_experts=8, **options), group)
    to_rank_0 = torch.tensor([[0, -1, -1]]).expand(TOKENS, -1)
    for _ in range(2):
        layer(inputs_for(0, TOKENS), to_rank_0)
    snapshot = layer.metrics.snapshot()
    layer.buffer.close()
    return snapshot.rows_dropped, snapshot.forwards


def one_rank_is_late(group: Any, late: int) -> list[int]:
    """Return how long this rank waited for each in a forward that one rank begins LATE_S after the other waits."""
    layer = MoELayer(config(), group)
    layer(inputs_for(0, TOKENS))
    before = layer.metrics.snapshot().waited_ns
    if group.rank() == late:
        while late not in layer.buffer.report().ranks[1 - late].waits_for:
            time.sleep(0.01)
        time.sleep(LATE_S)
    layer(inputs_for(0, TOKENS))
    after = layer.metrics.snapshot().waited_ns
    layer.buffer.close()
    return [b - a for a, b in zip(before, after, strict=True)]
