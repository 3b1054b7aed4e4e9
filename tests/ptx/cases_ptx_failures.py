"""Ops that fail, on two ranks whose clock the test advances: the error of each rank, and the state that remains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from ptx.gpu import PtxGpu
from support.ranks import ThreadRanks
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer
from moe_rt.errors import MoeRtError

TIMEOUT_S = 60.0
_HANG_S = 500.0


class Stage:
    """State that the ranks of a case share, other than their buffers."""

    def __init__(self, gpu: PtxGpu) -> None:
        self.gpu = gpu
        self.meeting = threading.Barrier(2)
        self.first_is_done = threading.Event()

    def until_first_waits(self) -> None:
        """Return when rank 0 has launched the wait of its second dispatch."""
        while self.gpu.launched.count("dispatch_receive") < 3:
            self.first_is_done.wait(0.001)

    def wind_until_first_is_done(self) -> None:
        for _ in range(int(_HANG_S)):
            self.gpu.wind(TIMEOUT_S + 1)
            if self.first_is_done.wait(1.0):
                return


Act = Callable[[Buffer, list[Any], Stage], None]


def outcomes_on(gpu: PtxGpu, name: str) -> list[str]:
    """Return the class and text of each rank's error, or "" for a rank without one."""
    act, changes = ACTS[name]
    gpu.launched.clear()
    spec = make_spec(2, **changes)
    inputs = make_inputs(spec, [12, 12], seed=1, kind="topk")
    stage = Stage(gpu)

    def case(group: Any) -> str:
        try:
            return outcome(group)
        except BaseException:  # the other rank waits for this one
            stage.first_is_done.set()
            stage.meeting.abort()
            raise

    def outcome(group: Any) -> str:
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(spec)) as buffer:
            mine = [each[buffer.rank].clone() for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
            said = ""
            try:
                act(buffer, mine, stage)
            except MoeRtError as error:
                said = f"{type(error).__name__}: {error}"
            if buffer.rank == 0:
                stage.first_is_done.set()
            stage.meeting.wait(_HANG_S)  # all kernels are over
            if not said:
                try:
                    buffer.check()
                except MoeRtError as error:
                    said = f"{type(error).__name__}: {error}"
            stage.meeting.wait(_HANG_S)
        return said

    return ThreadRanks(2, gpu).run(case)


def pair(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    buffer.combine(recv_x, recv_weights, handle)


def silent_peer(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    """Rank 1 skips the second dispatch; rank 0 then receives no rows."""
    pair(buffer, mine, stage)
    if buffer.rank == 1:
        return stage.wind_until_first_is_done()
    _, _, handle = buffer.dispatch(*mine)
    assert handle.offs.tolist() == [0] * len(handle.offs)


def silent_in_backward(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    x = mine[0].requires_grad_()
    recv_x, recv_weights, handle = buffer.dispatch(x, *mine[1:])
    out = buffer.combine(recv_x, recv_weights, handle)
    if buffer.rank == 1:
        return stage.wind_until_first_is_done()
    out.sum().backward()


def bad_expert_id(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    if buffer.rank == 1:
        mine[1][7, 1], mine[1][9, 0] = 99, -2
    _, _, handle = buffer.dispatch(*mine)
    assert handle.offs.sum() == 0


def no_room(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    mine[1][:] = torch.tensor([0, 1, 2])  # rank 0's experts
    _, _, handle = buffer.dispatch(*mine)
    assert handle.offs.sum() == 0


def refused_input(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    if buffer.rank == 1:
        mine[0] = mine[0][:, 1:]
    pair(buffer, mine, stage)


def other_layer(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    buffer.dispatch(*mine, tag=5 + buffer.rank)


def other_op(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    if buffer.rank == 1:
        buffer.dispatch(*mine)
    else:
        buffer.combine(recv_x, recv_weights, handle)


def peer_that_closed(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    pair(buffer, mine, stage)
    if buffer.rank == 1:
        buffer.close()
    else:
        pair(buffer, mine, stage)


def peer_that_closes_late(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    pair(buffer, mine, stage)
    if buffer.rank == 1:
        stage.until_first_waits()
        buffer.close()
    else:
        pair(buffer, mine, stage)


def aborting_peer(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    pair(buffer, mine, stage)
    if buffer.rank == 1:
        stage.until_first_waits()
        buffer.abort()
    pair(buffer, mine, stage)


def plan_of_nobody(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    """Rank 1 combines with a plan that no dispatch made."""
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    if buffer.rank == 1:
        handle.recv_plan.fill_(3)
    buffer.combine(recv_x, recv_weights, handle)


def rows_missing(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    buffer.combine(recv_x[: 3 if buffer.rank == 1 else None], recv_weights, handle)


def corrupt_lists(buffer: Buffer, mine: list[Any], stage: Stage) -> None:
    """Rank 1's counts are overwritten after it published them."""
    engine: Any = buffer._engine
    launch = engine._launcher.launch

    def scribble(launches: Any, stream: int) -> None:
        for one in launches:
            launch([one], stream)
            if one[0] == "dispatch_send" and buffer.rank == 1:
                region = engine._segments.mappings[0]
                start = engine._segments.addresses[1] - region.data_ptr()
                words = region[start : start + buffer.num_bytes].view(torch.int32)
                words = words[(256 + 2 * 2 * 128) // 4 :]  # past the mailboxes, whose headers also contain 12
                words[(words == 12).nonzero()[0, 0]] = 2**30

    engine._launcher.launch = scribble
    pair(buffer, mine, stage)


ACTS: dict[str, tuple[Act, dict[str, Any]]] = {
    "silent peer": (silent_peer, {}),
    "silent peer in backward": (silent_in_backward, {}),
    "bad expert id": (bad_expert_id, {}),
    "no room": (no_room, dict(capacity_factor=1.0)),
    "refused input": (refused_input, {}),
    "other layer": (other_layer, {}),
    "other op": (other_op, {}),
    "peer that closed": (peer_that_closed, {}),
    "peer that closes late": (peer_that_closes_late, {}),
    "aborting peer": (aborting_peer, {}),
    "plan of nobody": (plan_of_nobody, {}),
    "rows missing": (rows_missing, {}),
    "corrupt lists": (corrupt_lists, dict(num_max_tokens_per_rank=129)),  # too long to be pushed
}


def outcomes_of_all() -> dict[str, list[str]]:
    gpu = PtxGpu()
    return {name: outcomes_on(gpu, name) for name in ACTS}
