"""If many rows move, one block waits for the peers, and the blocks that move rows start when all have announced."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.emulated_gpu import EmulatedGpu, EmulatedKernels
from support.ranks import CASE_TIMEOUT_S, ThreadRanks
from support.rounds import full_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup, Tuning
from moe_rt.errors import MoeRtError, Op, PeerTimeout, Phase

APART = Tuning(wait_apart_tokens=8)
SPEC = make_spec(2, tuning=APART)
INPUTS = make_inputs(SPEC, [8, 7], seed=1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the launches of all ranks and their block counts."""
    launched: list[tuple[str, int]] = []
    launch = EmulatedKernels._launch

    def noted(self: EmulatedKernels, name: str, blocks: int, *rest: Any) -> None:
        launched.append((name, blocks))
        launch(self, name, blocks, *rest)

    monkeypatch.setattr(EmulatedKernels, "_launch", noted)
    return launched


def dispatch(buffer: Buffer) -> None:
    buffer.dispatch(*(each[buffer.rank] for each in (INPUTS.xs, INPUTS.topk_idx, INPUTS.topk_weights)))


@pytest.mark.emulated("watches the emulated launches")
def test_a_late_peer_holds_one_block(launches: list[tuple[str, int]]) -> None:
    def case(group: ThreadGroup) -> None:
        with Buffer(group, timeout_s=60.0, **buffer_kwargs(SPEC)) as buffer:
            if buffer.rank == 1:
                deadline = time.monotonic() + 60.0
                while len(launches) < 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(0.2)  # time for the peer to fail
                assert [name for name, _ in launches] == ["dispatch_send", "dispatch_wait"]
                assert launches[1] == ("dispatch_wait", 1)
            dispatch(buffer)
            buffer.check()

    ThreadRanks(2, EmulatedGpu()).run(case)
    names = [name for name, _ in launches]
    assert names.count("dispatch_receive") == 2
    assert names.count("dispatch_wait") == 1, "the rank of seven tokens waits in the launch that gathers"


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_the_oracle(size: int) -> None:
    gpu = EmulatedGpu()
    ThreadRanks(size, gpu).run(full_round, make_spec(size, tuning=APART), [12, 9, 8][:size], 1, "random")
    assert {"dispatch_wait", "combine_wait", "combine_backward_wait"} <= set(gpu.launched)


def test_what_the_wait_reports_ends_the_group() -> None:
    over = threading.Event()

    def case(group: ThreadGroup) -> Any:
        try:
            with Buffer(group, timeout_s=1.0, **buffer_kwargs(SPEC)) as buffer:
                if buffer.rank == 1:
                    over.wait(CASE_TIMEOUT_S)
                    return None
                try:
                    dispatch(buffer)
                    buffer.check()
                finally:
                    over.set()
        except MoeRtError as error:
            return error
        return None

    error = ThreadRanks(2, EmulatedGpu()).outcomes(case)[0]
    assert isinstance(error, PeerTimeout)
    assert (error.op, error.phase, error.peer) == (Op.DISPATCH, Phase.WAIT, 1)
