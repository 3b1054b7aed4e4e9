"""Unmapped peers: the same rounds over an emulated network, which delivers late and in any order."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch
from conformance.cases_scaled_rows import PLAIN, scaled_round
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.rounds import CPU, chain, expected_once, full_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.engine import backend
from moe_rt.errors import InvalidConfig, MoeRtError
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.lab.testing.rounds import check_bits, padded
from moe_rt.memory import loopback
from moe_rt.memory.segments import Segments

pytestmark = pytest.mark.emulated("has an emulated network")
UNREACHABLE = {
    "all": lambda rank, peer: peer != rank,
    "every other": lambda rank, peer: (rank + peer) % 2 == 1,
}


def leave_unmapped(monkeypatch: pytest.MonkeyPatch, unreachable: str) -> None:
    """Leave peers unmapped: the heap maps a rank's segment, and only the peers' segments that the rule leaves."""
    allocate = loopback.allocate

    def over_network(rendezvous: Rendezvous, num_bytes: int, timeout_s: float, gpu: EmulatedGpu) -> Segments:
        segments = allocate(rendezvous, num_bytes, timeout_s, gpu)
        rank, addresses = rendezvous.rank, segments.addresses
        segments.symmetric = addresses[rank]
        gpu.networks[segments.symmetric] = (ctypes.c_void_p * len(addresses))(*addresses)
        is_remote = UNREACHABLE[unreachable]
        segments.addresses = [0 if is_remote(rank, peer) else a for peer, a in enumerate(addresses)]
        return segments

    monkeypatch.setattr(loopback, "allocate", over_network)


@pytest.fixture(params=list(UNREACHABLE))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    leave_unmapped(monkeypatch, request.param)
    return EmulatedGpu()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_round(gpu: EmulatedGpu, size: int, dtype: torch.dtype) -> None:
    spec = make_spec(size, dtype=dtype, placement=[e % size for e in range(9)])
    tokens = [(5 * rank) % 13 for rank in range(size)]
    ThreadRanks(size, gpu).run(full_round, spec, tokens, size, "random")
    assert gpu.launched.count("dispatch_fetch") == size


@pytest.mark.parametrize("codec", [None, torch.int8])
def test_rows_that_return_one_by_one(gpu: EmulatedGpu, codec: torch.dtype | None) -> None:
    """A row and its scalar are staged and put together."""
    spec = make_spec(3, sums="invariant", combine_dtype=codec, placement=[e % 3 for e in range(9)])
    ThreadRanks(3, gpu).run(full_round, spec, [12, 0, 7], 3, "random")


@pytest.mark.parametrize("size", [2, 3])
def test_rows_with_scales(gpu: EmulatedGpu, size: int) -> None:
    """Rows with scales, whose size differs from the buffer's rows, use the same staging."""
    spec = make_spec(size, dtype=torch.bfloat16, placement=[e % size for e in range(9)])
    ThreadRanks(size, gpu).run(scaled_round, spec, PLAIN, [12, 0, 7][:size], [1, 2])


def test_several_ops_under_way_are_refused(gpu: EmulatedGpu) -> None:
    raised = ThreadRanks(2, gpu).outcomes(full_round, make_spec(2, depth=2), [3, 2], 1, "random")
    assert {type(error) for error in raised} == {InvalidConfig}
    assert "depth: got 2, expected 1 for GPUs" in str(raised[0])


def test_overflow_is_dropped(gpu: EmulatedGpu) -> None:
    spec = make_spec(3, capacity_factor=0.4, overflow="drop")
    ThreadRanks(3, gpu).run(full_round, spec, [12, 12, 12], 1, "one_expert")


def test_chain(gpu: EmulatedGpu) -> None:
    assert ThreadRanks(3, gpu).run(chain, 40) == [40] * 3


def dispatches_in_a_row(group: Any, rounds: int) -> None:
    """Run several dispatches, then their combines: only the protocol orders the dispatches' signals."""
    spec = make_spec(2)
    inputs = make_inputs(spec, [12, 7], seed=6)
    expected = expected_once(spec, inputs, seed=6)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        rank = buffer.rank
        for _ in range(rounds):
            given = (inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
            sent = [buffer.dispatch(*given) for _ in range(5)]
            for recv_x, recv_weights, handle in sent:
                check_bits("recv_x", recv_x[: handle.offs[-1]], expected.received[rank].recv_x)
                y = padded(expected.ys[rank], buffer.capacity, CPU)
                check_bits("out", buffer.combine(y, recv_weights, handle), expected.outs[rank])


def test_signals_of_ops_in_a_row(gpu: EmulatedGpu) -> None:
    ThreadRanks(2, gpu).run(dispatches_in_a_row, 8)


def closes_after_its_last_op(group: Any, times: int) -> None:
    spec = make_spec(2)
    inputs = make_inputs(spec, [12, 7], seed=6)
    expected = expected_once(spec, inputs, seed=6)
    for _ in range(times):
        with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
            rank = buffer.rank
            recv_x, _, handle = buffer.dispatch(inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
            buffer.check()
            check_bits("recv_x", recv_x[: handle.offs[-1]], expected.received[rank].recv_x)


def test_closing_does_not_overtake_the_last_signal(gpu: EmulatedGpu) -> None:
    ThreadRanks(2, gpu).run(closes_after_its_last_op, 40)


def late(group: Any) -> str:
    """Rank 1 announces half a timeout after rank 0 has timed out, when rank 0's next launch would still poll."""
    spec = make_spec(2)
    inputs = make_inputs(spec, [12, 7], seed=6)
    expected = expected_once(spec, inputs, seed=6)
    with Buffer(group, timeout_s=1.0, **buffer_kwargs(spec)) as buffer:
        rank = buffer.rank
        if rank == 1:
            time.sleep(1.5)
        try:
            recv_x, _, handle = buffer.dispatch(inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
            buffer.check()
        except MoeRtError as error:
            return type(error).__name__
        check_bits("recv_x", recv_x[: handle.offs[-1]], expected.received[rank].recv_x)
        return "right rows"


def test_a_signal_after_the_timeout_is_no_signal(gpu: EmulatedGpu) -> None:
    """A signal after the timeout is ignored; rows by lists that were never fetched would be silently wrong."""
    outcomes = ThreadRanks(2, gpu).run(late)
    assert set(outcomes) <= {"PeerTimeout", "GroupPoisoned", "GroupClosed", "right rows"}


def test_memory_of_the_network_outlives_the_last_launch(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the queued kernels of a closed buffer may still touch is kept until the stream is done."""
    kept: list[Any] = []
    monkeypatch.setattr(EmulatedGpu, "outlive_stream", lambda _, memory: kept.append(memory.data_ptr()))

    def case(group: Any) -> set[int]:
        buffer = Buffer(group, **buffer_kwargs(make_spec(2)))
        network = Segments([], [], [torch.zeros(8), "no tensor", torch.zeros(8)])
        engine: Any = buffer._engine
        engine._network = network
        expected = {m.data_ptr() for m in (*engine._launcher.memory, engine._launcher.record)}
        expected |= {
            m.data_ptr() for m in (*engine._segments.mappings, *network.mappings) if isinstance(m, torch.Tensor)
        }
        buffer.close()
        return expected

    for expected in ThreadRanks(2, gpu).run(case):
        assert expected <= set(kept)


def test_memory_for_the_network_has_one_size_on_all_ranks(monkeypatch: pytest.MonkeyPatch, gpu: EmulatedGpu) -> None:
    """Symmetric memory is for the rank with the most blocks, though each rank chooses its own number."""
    sizes: list[int] = []
    real = backend.network_bytes
    monkeypatch.setattr(backend, "network_bytes", lambda spec, most: sizes.append(most) or real(spec, most))
    spec = make_spec(2)

    def case(group: ThreadGroup) -> None:
        Buffer(group, num_sms=1 + group.rank, **buffer_kwargs(spec)).close()

    ThreadRanks(2, gpu).run(case)
    assert sizes == [2, 2]
