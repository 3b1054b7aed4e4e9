"""Compiled kernels that move rows through rings: the oracle's bits, no race, and each missing order is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device.test_ring import ring_rounds
from ptx import cases_ptx_orders as cases
from ptx.faulty_kernels import in_entry
from ptx.gpu import PtxFault
from ptx.own_process import isolated, run_on
from ptx.ring_kernels import RingGpu
from ptx.test_ptx_graphs import capture_and_replay
from support.routing import make_spec

FP8 = torch.float8_e4m3fn
LONG = dict(hidden=272)  # fp32: rows of five pieces
CODED = dict(dtype=torch.bfloat16, hidden=144, dispatch_dtype=FP8, combine_dtype=FP8)


def rounds_of_sizes(changes: dict[str, Any], sizes: tuple[int, ...], tokens: list[int], seed: int) -> None:
    gpu = RingGpu(seed)
    for size in sizes:
        spec = make_spec(size, num_max_tokens_per_rank=max(tokens), **changes)
        run_on(gpu, size, ring_rounds, spec, tokens[:size], 2)


def test_equal_to_the_oracle() -> None:
    isolated(rounds_of_sizes, LONG, (1, 2, 3), [12, 0, 7], 1)


def test_rows_that_are_pulled() -> None:
    """Rows are pulled from 65 tokens per rank upwards."""
    isolated(rounds_of_sizes, LONG, (2,), [70, 66], 2)


@pytest.mark.sweep
def test_gradients_of_coded_rows() -> None:
    isolated(rounds_of_sizes, CODED, (2, 3), [12, 7, 0], 1)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10, 20))
def test_other_orders_of_lanes(seed: int) -> None:
    isolated(rounds_of_sizes, LONG, (3,), [70, 0, 33], seed)


def replayed() -> None:
    gpu = RingGpu()
    run_on(gpu, 2, capture_and_replay, gpu, LONG, 2)


def test_replays() -> None:
    isolated(replayed)


# missing order -> kernel, instruction, report without it.
MISSING = {
    "what peers wrote is not shown to copies": ("dispatch_receive", "fence.proxy.async", "no fence shows copies the"),
    "barriers are not shown to copies": ("dispatch_send", "fence.mbarrier_init", "no fence shows copies the mbarrier"),
    "a piece leaves before it is there": ("combine_backward_send", "mbarrier.try_wait", "nothing orders this"),
    "a slot is filled that is not read": ("dispatch_receive", "cp.async.bulk.wait_group.read", "nothing orders this"),
    "a launch ends before its stores": (
        "combine_backward_send",
        "cp.async.bulk.wait_group ",
        "a lane ends that has not",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_orders(name: str) -> None:
    """A case notices the missing order at each of its places in the kernel."""
    entry, text, says = MISSING[name]
    places = [order for order in cases.orders("ring", entry) if order.text.startswith(text)]
    assert places
    for order in places:
        said = isolated(cases.noticed, "ring", order, list(cases.KERNELS["ring"].cases))
        assert says in said, f"{order}: {said}"


def gradients_with(edit: Callable[[str], str]) -> None:
    run_on(RingGpu(edit=edit), 2, ring_rounds, make_spec(2, **LONG), [12, 7], 2)


def test_announced_before_rows_are_there() -> None:
    """Waiting only for the reads of slots is reported: the rows have not yet been written where peers read them."""
    edit = in_entry("combine_backward_send", "bulk.wait_group 0;", "bulk.wait_group.read 0;")
    with pytest.raises(PtxFault, match=r"race on global memory: nothing orders this read after the write"):
        isolated(gradients_with, edit)
