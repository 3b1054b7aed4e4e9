"""Errors are raised on every rank by reading host memory only; nothing here waits for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.errors import CapacityOverflow, InvalidConfig, InvalidRouting, MoeRtError, PeerTimeout
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, num_sms, on_gpu, streams_of, torch_device
from moe_rt.lab.check.steps import Check, Table
from moe_rt.lab.testing.rounds import WrongOutput, buffer_kwargs, make_spec

TIMEOUT_S, SLACK_S = 2.0, 3.0  # for the peer that never arrives
PATIENCE_S = 30.0  # for errors that do not depend on a clock
TOKENS = 8


def check(check: Check) -> None:
    trials: dict[str, Callable[[Any], str]] = {
        "a peer that never comes": late_peer,
        "a bad expert id": bad_expert,
        "more rows than capacity": overflow,
        "two ranks on one stream": shared_stream,
        "too many ranks": too_many_ranks,
    }
    if not on_gpu(check.device):
        del trials["two ranks on one stream"]  # the emulated GPU identifies ranks by their threads
    rows = []
    for name, trial in trials.items():
        with check.part(name):
            rows.append([name, trial(check.device)])
    check.say(f"{len(rows)} of {len(trials)} raised as they should")
    check.add(Table("Errors", ["what", "raised"], rows))


def late_peer(device: Any) -> str:
    """Rank 1 stays away, and rank 0 is notified in time. Rank 1 then finds what rank 0 had sent before, but nothing
    later."""
    over = threading.Event()

    def work(group: ThreadGroup) -> tuple[MoeRtError, float]:
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(make_spec(2))) as buffer:
            if buffer.rank == 1:
                over.wait(TIMEOUT_S + 2 * SLACK_S)
                _dispatch(buffer, device)
            begin = time.monotonic()
            _dispatch(buffer, device)
            try:
                error = _next_error(buffer, TIMEOUT_S + SLACK_S)
            finally:
                over.set()
            return error, time.monotonic() - begin

    (error, seconds), (late, _) = ThreadRanks(2, device).run(work)
    _expect(error, PeerTimeout)
    if not 0.9 * TIMEOUT_S < seconds < TIMEOUT_S + SLACK_S:
        raise WrongOutput(f"PeerTimeout: got it after {seconds:.2f} s, expected it after {TIMEOUT_S:g} s")
    return f"PeerTimeout after {seconds:.2f} s, and {type(late).__name__} for who came later"


def bad_expert(device: Any) -> str:
    """Rank 0 passes an expert id that does not exist."""

    def work(group: ThreadGroup) -> MoeRtError:
        with Buffer(group, timeout_s=PATIENCE_S, **buffer_kwargs(make_spec(2))) as buffer:
            _dispatch(buffer, device, expert=99 if buffer.rank == 0 else 0)
            return _next_error(buffer, PATIENCE_S)

    for error in ThreadRanks(2, device).run(work):
        _expect(error, InvalidRouting)
    return "InvalidRouting on both ranks"


def overflow(device: Any) -> str:
    spec = make_spec(2, capacity_factor=0.2)

    def work(group: ThreadGroup) -> MoeRtError:
        with Buffer(group, timeout_s=PATIENCE_S, **buffer_kwargs(spec)) as buffer:
            _dispatch(buffer, device)
            return _next_error(buffer, PATIENCE_S)

    for error in ThreadRanks(2, device).run(work):
        _expect(error, CapacityOverflow)
    return "CapacityOverflow on both ranks"


def shared_stream(device: Any) -> str:
    """Two ranks on one stream are refused before the second launch can queue up after the first one's wait."""

    def work(group: ThreadGroup) -> MoeRtError | None:
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(make_spec(2))) as buffer:
            inputs = _inputs(buffer, device)  # copying them later would wait for the stream
            if buffer.rank == 0:
                buffer.dispatch(*inputs)
                _next_error(buffer, TIMEOUT_S + SLACK_S)  # for a peer that did not arrive
                return None
            _await_stream_of(0, buffer)
            try:
                buffer.dispatch(*inputs)
            except InvalidConfig as error:
                return error
            return None

    (stream,) = streams_of(device, 1)
    _expect(ThreadRanks(2, device, streams=[stream, stream]).run(work)[1], InvalidConfig)
    return "InvalidConfig on the second rank"


def too_many_ranks(device: Any) -> str:
    size = num_sms(device) + 1
    spec = make_spec(size, num_experts=size, num_max_tokens_per_rank=1)

    def work(group: ThreadGroup) -> MoeRtError | None:
        try:
            Buffer(group, timeout_s=PATIENCE_S, **buffer_kwargs(spec)).close()
        except InvalidConfig as error:
            return error
        return None

    (stream,) = streams_of(device, 1)  # no op is run
    for error in ThreadRanks(size, device, streams=[stream] * size, reserve_bytes=0).run(work):
        _expect(error, InvalidConfig)
    return f"InvalidConfig on all {size} ranks"


def _dispatch(buffer: Buffer, device: Any, expert: int = 0) -> None:
    """Dispatch one batch. Errors that the op raises directly belong to the caller."""
    buffer.dispatch(*_inputs(buffer, device, expert))


def _inputs(buffer: Buffer, device: Any, expert: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs that route all tokens to one expert."""
    spec, where = buffer.spec, torch_device(device)
    tokens = min(TOKENS, spec.num_max_tokens_per_rank)
    idx = torch.full((tokens, spec.num_topk), expert, device=where)
    weights = torch.ones(tokens, spec.num_topk, dtype=spec.acc_dtype, device=where)
    return torch.ones(tokens, spec.hidden, dtype=spec.dtype, device=where), idx, weights


def _await_stream_of(rank: int, buffer: Buffer) -> None:
    """Return once a peer has begun its first op on a stream of the GPU that it shares with this rank."""
    engine: Any = buffer._engine
    deadline = time.monotonic() + PATIENCE_S
    while rank not in engine._segments.streams and time.monotonic() < deadline:
        time.sleep(0.002)


def _next_error(buffer: Buffer, seconds: float) -> MoeRtError:
    """Return the first error that a check raises. Checking does not query the device, so polling costs nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            buffer.check()
        except MoeRtError as error:
            return error
        time.sleep(0.002)
    raise WrongOutput(f"rank {buffer.rank}: got no error within {seconds:g} s")


def _expect(error: object, kind: type[MoeRtError]) -> None:
    if not isinstance(error, kind):
        raise WrongOutput(f"got {type(error).__name__}: {error}; expected {kind.__name__}") from (
            error if isinstance(error, Exception) else None
        )
