"""Peers reached over NCCL's device interface: cuda/device/gin_net.h itself, over functions that promise no more than
NCCL's and do everything else as oddly as they may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device.emulated import GIN, EmulatedGpu, library
from device.test_gpu_nodes import NODES, spec_of
from device.test_network import (
    UNREACHABLE,
    closes_after_its_last_op,
    dispatches_in_a_row,
    late,
    leave_unmapped,
)
from harness import ThreadRanks
from rounds import chain, full_round
from routing import make_spec

LANES = (3, 32)


@pytest.mark.parametrize("unreachable", UNREACHABLE)
@pytest.mark.parametrize("lanes", LANES)
def test_round(monkeypatch: pytest.MonkeyPatch, unreachable: str, lanes: int) -> None:
    """Forward and backward, with the oracle's bits."""
    leave_unmapped(monkeypatch, unreachable)
    spec = make_spec(3, placement=[e % 3 for e in range(9)])
    gpu = EmulatedGpu(threads=lanes, gin=True)
    ThreadRanks(3, gpu).run(full_round, spec, [12, 5, 0], 3, "random")
    assert gpu.launched.count("dispatch_fetch") == 3


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    leave_unmapped(monkeypatch, "all")
    return EmulatedGpu(gin=True)


def test_chain(far_apart: EmulatedGpu) -> None:
    """Signals count ops: none is left out, whoever sends nothing."""
    assert ThreadRanks(3, far_apart).run(chain, 30) == [30] * 3


def test_signals_of_ops_in_a_row(far_apart: EmulatedGpu) -> None:
    ThreadRanks(2, far_apart).run(dispatches_in_a_row, 10)


@pytest.fixture
def backwards() -> Iterator[None]:
    """Of signals, those that were asked for last are seen first."""
    library(GIN).emulated_backwards(1)
    yield
    library(GIN).emulated_backwards(0)


def test_closing_before_the_last_signal_is_seen(far_apart: EmulatedGpu, backwards: None) -> None:
    """Its header has been seen, so that the op is not given up."""
    ThreadRanks(2, far_apart).run(closes_after_its_last_op, 6)


def test_a_later_op_before_this_one(far_apart: EmulatedGpu, backwards: None) -> None:
    """Ranks are not said to be in another op."""
    assert ThreadRanks(3, far_apart).run(chain, 6) == [6] * 3


def test_a_signal_after_the_timeout_is_no_signal(far_apart: EmulatedGpu) -> None:
    """Whoever gives up tells the other, or has been told."""
    outcomes = ThreadRanks(2, far_apart).run(late)
    assert set(outcomes) <= {"PeerTimeout", "GroupPoisoned", "GroupClosed", "right rows"}


@pytest.mark.parametrize(("name", "lanes"), [("2+2", 3), ("1+2", 32)])
def test_two_levels(name: str, lanes: int) -> None:
    nodes = NODES[name]
    spec = spec_of(nodes, placement=[(8 - e) % len(nodes) for e in range(9)])
    gpu = EmulatedGpu(threads=lanes, gin=True)
    ThreadRanks(len(nodes), gpu, nodes=nodes).run(full_round, spec, [12, 0, 7, 5][: len(nodes)], 1, "random")


def test_chain_in_two_levels() -> None:
    assert ThreadRanks(3, EmulatedGpu(gin=True), nodes=NODES["1+2"]).run(chain, 15, "two_level") == [15] * 3
