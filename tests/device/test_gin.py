"""Peers over NCCL's device interface: the real cuda/gpu/gin_net.h, over functions that guarantee no more than NCCL's
and otherwise behave as unfavourably as they may."""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from device.test_gpu_nodes import NODES, spec_of
from device.test_network import UNREACHABLE, closes_after_its_last_op, dispatches_in_a_row, late
from heap.fake_nccl import Cluster, NcclGinConnectionType
from support.emulated_gpu import GIN, EmulatedGpu, library
from support.ranks import ThreadRanks
from support.rounds import chain, full_round
from support.routing import make_spec

from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory import gin, loopback
from moe_rt.memory.segments import Segments

pytestmark = pytest.mark.emulated("has an emulated network")
LANES = (3, 32)
MOST_RANKS = 4


def dev_comm(rank: int, num_ranks: int) -> Any:
    room = ctypes.create_string_buffer(library(GIN).emulated_comm(rank, num_ranks, None))
    library(GIN).emulated_comm(rank, num_ranks, room)
    return room


def window(begins: list[int]) -> int:
    make = library(GIN).emulated_window
    make.restype = ctypes.c_void_p
    return int(make(len(begins), (ctypes.c_void_p * len(begins))(*begins)))


def over_gin(monkeypatch: pytest.MonkeyPatch, unreachable: str) -> Cluster:
    """Virtual ranks allocate as processes do with the heap "gin", on the stand-in for nccl.core."""
    cluster = Cluster(MOST_RANKS, dev_comm=dev_comm, window=window)
    worlds = [gin.World(core.load) for core in cluster.cores]
    numbers = [itertools.count() for _ in worlds]
    streams: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, core in enumerate(cluster.cores):
        is_remote = UNREACHABLE.get(unreachable, lambda *_: False)
        core.unmapped = {peer for peer in range(MOST_RANKS) if is_remote(rank, peer)}

    def allocate(rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: EmulatedGpu) -> Segments:
        rank = rendezvous.rank
        own = SimpleNamespace(device=gpu.device, zeros=gpu.zeros, synchronize=gpu.synchronize, uuid=str(rank))
        segments = worlds[rank].allocate(rendezvous, num_bytes, timeout_s, own)
        cluster.marks.append(segments.marks)
        segments.streams = streams[next(numbers[rank])]  # these ranks share a GPU, and each has a part of it
        return segments

    monkeypatch.setattr(loopback, "allocate", allocate)
    return cluster


@pytest.mark.parametrize("unreachable", UNREACHABLE)
@pytest.mark.parametrize("lanes", LANES)
def test_round(monkeypatch: pytest.MonkeyPatch, unreachable: str, lanes: int) -> None:
    """A round forward and backward has the oracle's bits."""
    over_gin(monkeypatch, unreachable)
    spec = make_spec(3, placement=[e % 3 for e in range(9)])
    gpu = EmulatedGpu(threads=lanes)
    ThreadRanks(3, gpu).run(full_round, spec, [12, 5, 0], 3, "random")
    assert gpu.launched.count("dispatch_fetch") == 3


@pytest.fixture
def remote_apart(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    over_gin(monkeypatch, "all")
    return EmulatedGpu()


def test_chain(remote_apart: EmulatedGpu) -> None:
    """Signals count ops, so a rank that sends no tokens still signals every op."""
    assert ThreadRanks(3, remote_apart).run(chain, 30) == [30] * 3


def test_signals_of_ops_in_a_row(remote_apart: EmulatedGpu) -> None:
    ThreadRanks(2, remote_apart).run(dispatches_in_a_row, 10)


@pytest.fixture
def backwards() -> Iterator[None]:
    """Signals become visible in reverse order."""
    library(GIN).emulated_backwards(1)
    yield
    library(GIN).emulated_backwards(0)


def test_closing_before_the_last_signal_is_seen(remote_apart: EmulatedGpu, backwards: None) -> None:
    """Closing does not abort the peer's op whose header was seen before its signal."""
    ThreadRanks(2, remote_apart).run(closes_after_its_last_op, 6)


def test_a_later_op_before_this_one(remote_apart: EmulatedGpu, backwards: None) -> None:
    """A later op's signal that is seen first does not raise CallOrderMismatch."""
    assert ThreadRanks(3, remote_apart).run(chain, 6) == [6] * 3


def test_a_signal_after_the_timeout_is_no_signal(remote_apart: EmulatedGpu) -> None:
    """A late signal gives right rows or an error: the rank that timed out poisons the peer, or was poisoned."""
    outcomes = ThreadRanks(2, remote_apart).run(late)
    assert set(outcomes) <= {"PeerTimeout", "GroupPoisoned", "GroupClosed", "right rows"}


@pytest.mark.parametrize(("name", "lanes"), [("2+2", 3), ("1+2", 32)])
def test_two_levels(monkeypatch: pytest.MonkeyPatch, name: str, lanes: int) -> None:
    over_gin(monkeypatch, "none")
    nodes = NODES[name]
    gpu = EmulatedGpu(threads=lanes)
    for sums in ("ranked", "invariant"):
        spec = spec_of(nodes, placement=[(8 - e) % len(nodes) for e in range(9)], sums=sums)
        ThreadRanks(len(nodes), gpu, nodes=nodes).run(full_round, spec, [12, 0, 7, 5][: len(nodes)], 1, "random")


def test_chain_in_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    over_gin(monkeypatch, "none")
    assert ThreadRanks(3, EmulatedGpu(), nodes=NODES["1+2"]).run(chain, 15, "two_level") == [15] * 3


def test_memory_of_a_closed_buffer_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a closed buffer is reused once every peer's mark has arrived, when the emulated stream is done."""
    cluster = over_gin(monkeypatch, "all")
    gpu = EmulatedGpu()
    for _ in range(3):
        assert ThreadRanks(3, gpu).run(chain, 3) == [3] * 3
    assert sorted(len(marks) for marks in cluster.marks) == [0] * 9 + [4] * 9, "of two peers, for both kinds of op"
    assert len(cluster.of("mem_alloc")) == 3 * 2, "of each rank, a segment and what the network needs"


def test_two_levels_need_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = over_gin(monkeypatch, "none")
    cluster.network = NcclGinConnectionType.NONE
    outcomes = ThreadRanks(3, EmulatedGpu(), nodes=NODES["1+2"]).outcomes(chain, 1, "two_level")
    assert all("got no network of NCCL's" in str(outcome) for outcome in outcomes), outcomes
