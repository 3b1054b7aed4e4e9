"""Errors of GPU ranks name the same rank, cause and numbers on every rank."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from support.routing import make_spec
from test_cuda_faults import SIZE, outcomes, pair

from moe_rt import Buffer
from moe_rt.errors import CapacityOverflow, Code, GroupClosed, GroupPoisoned, InvalidInput, InvalidRouting

POISON = 128  # address of the poison word, see cuda/protocol/core/layout.h
UNEVEN = [0, 0, 0, 1, 1, 1, 1, 1, 2]


def receive_together(buffer: Buffer, announced: threading.Barrier) -> None:
    """Let receiving launches wait until all ranks have announced: otherwise poison may reach a rank first."""
    launch = buffer._engine._launcher.launch  # type: ignore[attr-defined]

    def when_all_have_announced(launches: Any, stream: int) -> None:
        for one in launches:
            if one[0] == "dispatch_receive":
                announced.wait(60.0)
            launch([one], stream)

    buffer._engine._launcher.launch = when_all_have_announced  # type: ignore[attr-defined]


@pytest.mark.emulated("orders launches by the host")
def test_the_first_of_two_refusals() -> None:
    announced = threading.Barrier(SIZE)

    def act(buffer: Buffer, mine: Any) -> None:
        receive_together(buffer, announced)
        if buffer.rank > 0:
            mine[1][0, 0] = 90 + buffer.rank
        buffer.dispatch(*mine)

    for error in outcomes(act):
        assert (type(error), error.peer) == (InvalidRouting, 1)
        assert "expert id 91" in str(error)


@pytest.mark.emulated("orders launches by the host")
def test_the_capacity_of_the_rank_that_overflows() -> None:
    announced, capacity = threading.Barrier(SIZE), dict(capacity_factor=1.0, placement=UNEVEN)
    spec = make_spec(SIZE, **capacity)
    assert len({spec.capacity(rank) for rank in range(SIZE)}) > 1

    def act(buffer: Buffer, mine: Any) -> None:
        receive_together(buffer, announced)
        mine[1][:] = torch.tensor([0, 1, 2])
        buffer.dispatch(*mine)

    for error in outcomes(act, **capacity):
        assert isinstance(error, CapacityOverflow)
        assert f"rank 0 would receive 108 rows, expected at most its capacity of {spec.capacity(0)}" in str(error)


def test_rows_that_are_missing() -> None:
    """The host does not know how many rows were received: the kernel refuses to read rows past y."""

    def act(buffer: Buffer, mine: Any) -> None:
        recv_x, recv_weights, handle = buffer.dispatch(*mine)
        rows = int(handle.offs[-1]) - (buffer.rank == 1)
        buffer.combine(recv_x[:rows], recv_weights, handle)

    errors = outcomes(act)
    assert {type(error) for error in errors} <= {InvalidInput, GroupPoisoned}
    refused = [str(error) for error in errors if isinstance(error, InvalidInput)]
    numbers = [re.search(r"got (\d+)(?: rows)?, expected (?:at least the )?(\d+)", text) for text in refused]
    assert {int(found[2]) - int(found[1]) for found in numbers if found} == {1}, refused


@pytest.mark.emulated("rewrites the emulated GPU's memory")
def test_a_failure_of_another_rank_is_passed_on_as_it_was() -> None:
    """Rank 0 finds the word of rank 1, which has not reached rank 2, and is not taken for the cause itself."""
    failed = threading.Event()

    def act(buffer: Buffer, mine: Any) -> None:
        segments = buffer._engine._segments  # type: ignore[attr-defined]
        if buffer.rank == 0:
            at = segments.addresses[0] - segments.mappings[0].data_ptr() + POISON
            word = segments.mappings[0][at : at + 8].view(torch.int64)
            word.fill_((2 + 1) << 32 | (1 + 1) << 16 | int(Code.PEER_DEAD))
        else:
            failed.wait(60.0)
        try:
            pair(buffer, mine)
            buffer.check()
            pair(buffer, mine)
        finally:
            failed.set()

    for error in outcomes(act):
        assert "rank 1 failed first: PeerDead, concerning rank 2" in str(error)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_closed(who: int) -> None:
    """Either of two ranks notices that the other has closed."""

    def act(buffer: Buffer, mine: Any) -> None:
        if buffer.rank == who:
            buffer.close()
        pair(buffer, mine)

    assert [type(error) for error in outcomes(act, size=2)] == [GroupClosed] * 2
