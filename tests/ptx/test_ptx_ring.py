"""Compiled kernels that move rows through rings: bits of the oracle, no race, and each order that is missing shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device.test_ring import ring_rounds
from harness import ThreadRanks
from ptx.gpu import PtxFault, PtxGpu
from ptx.isolated import isolated, run_on
from ptx.planted import in_entry
from routing import make_spec

from moe_rt.native import ring

FP8 = torch.float8_e4m3fn
# Rows of five pieces; of one, dropped, and coded but for gradients.
SPECS: dict[str, dict[str, Any]] = {
    "fp32": dict(hidden=272),
    "bf16, coded": dict(dtype=torch.bfloat16, hidden=144, dispatch_dtype=FP8, combine_dtype=FP8),
}


class RingGpu(PtxGpu):
    """Slots of 256 bytes, fewer than it takes to have more under way than lanes have."""

    bulk_bytes = 48 << 10

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        ring._LANES = 0


def rounds_of_sizes(changes: dict[str, Any], tokens: list[int], seed: int) -> None:
    gpu = RingGpu(seed)
    for size in (1, 2, 3):
        spec = make_spec(size, num_max_tokens_per_rank=max(tokens), **changes)
        ThreadRanks(size, gpu).run(ring_rounds, spec, tokens[:size], 2)


@pytest.mark.parametrize("name", SPECS)
def test_equal_to_the_oracle(name: str) -> None:
    isolated(rounds_of_sizes, SPECS[name], [12, 0, 7], 1)
