"""A GPU rank that closes announces it to every rank that waits for it, in either kind of op; no wait times out."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import GroupClosed, MoeRtError, Op

TIMEOUT_S = 30.0  # without the announcement a rank raises PeerTimeout


@pytest.mark.parametrize("waits_in", [Op.DISPATCH, Op.COMBINE])
def test_a_peer_that_closed(waits_in: Op) -> None:
    """A rank that waits in this op for a peer that closed raises before the timeout."""
    spec = make_spec(2)
    inputs = make_inputs(spec, [12] * 2, seed=1, kind="topk")

    def case(group: ThreadGroup) -> Any:
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(spec)) as buffer:
            mine = [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
            received = buffer.dispatch(*mine)
            if waits_in == Op.DISPATCH:
                buffer.combine(*received)
            if buffer.rank == 1:
                return None
            try:
                buffer.dispatch(*mine) if waits_in == Op.DISPATCH else buffer.combine(*received)
                while True:
                    buffer.check()
                    time.sleep(0.01)
            except MoeRtError as error:
                return error

    error, nothing = ThreadRanks(2, EmulatedGpu()).outcomes(case)
    assert nothing is None
    assert isinstance(error, GroupClosed), error
    assert (error.op, error.peer) == (waits_in, 1)
