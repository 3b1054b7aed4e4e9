"""Peers that are not mapped: the same rounds over an emulated network, which holds puts back until they are flushed."""

from __future__ import annotations

import ctypes

import pytest
import torch
from device.emulated import EmulatedGpu
from harness import ThreadRanks
from rounds import chain, full_round
from routing import make_spec

from moe_rt.heap import loopback
from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import Segments

UNREACHABLE = {
    "all": lambda rank, peer: peer != rank,
    "every other": lambda rank, peer: (rank + peer) % 2 == 1,
}


@pytest.fixture(params=list(UNREACHABLE))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """Its heap maps a rank's own segment, and of the others those that the parameter leaves."""
    allocate = loopback.allocate

    def over_network(rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: EmulatedGpu) -> Segments:
        segments = allocate(rendezvous, num_bytes, timeout_s, gpu)
        rank, addresses = rendezvous.rank, segments.addresses
        segments.symmetric = addresses[rank]
        gpu.networks[segments.symmetric] = (ctypes.c_void_p * len(addresses))(*addresses)
        unreachable = UNREACHABLE[request.param]
        segments.addresses = [0 if unreachable(rank, peer) else a for peer, a in enumerate(addresses)]
        return segments

    monkeypatch.setattr(loopback, "allocate", over_network)
    return EmulatedGpu()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_round(gpu: EmulatedGpu, size: int, dtype: torch.dtype) -> None:
    spec = make_spec(size, dtype=dtype, placement=[e % size for e in range(9)])
    tokens = [(5 * rank) % 13 for rank in range(size)]
    ThreadRanks(size, gpu).run(full_round, spec, tokens, size, "random")
    assert gpu.launched.count("dispatch_fetch") == size


def test_overflow_is_dropped(gpu: EmulatedGpu) -> None:
    spec = make_spec(3, capacity_factor=0.4, overflow="drop")
    ThreadRanks(3, gpu).run(full_round, spec, [12, 12, 12], 1, "one_expert")


def test_chain(gpu: EmulatedGpu) -> None:
    assert ThreadRanks(3, gpu).run(chain, 100) == [100] * 3
