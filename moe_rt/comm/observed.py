"""What a buffer tells of itself: its sizes, how its group fares, and where time goes. Nothing here is collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from moe_rt.config.options import Route
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.diagnostics.report import Report
from moe_rt.native.engine import Engine


@_disable_dynamo  # a graph break that dynamo knows: what it finds by itself it warns of
def _rows_for_a_graph(engine: Engine, num_tokens: int) -> Tensor:
    return engine.token_window(num_tokens, compiled=True)


class Observed:
    """The part of `moe_rt.Buffer` that moves nothing."""

    spec: BufferSpec
    rank: int
    _engine: Engine

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self._engine.device

    @property
    def capacity(self) -> int:
        """Rows of recv_x on this rank; grows if overflow is "retry"."""
        return self._engine.capacity

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank (L)."""
        return self.spec.placement.num_local(self.rank)

    @property
    def topology(self) -> Topology:
        """Which node each rank is on."""
        return self.spec.topology

    @property
    def route(self) -> Route:
        """How rows go between nodes: "flat", or "two_level"."""
        return "two_level" if self.spec.route == "two_level" else "flat"

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank; docs/protocol.md has the formula."""
        return self._engine.shape.segment_bytes()

    def token_window(self, num_tokens: int) -> Tensor:
        """Memory for the rows of the next dispatch, which then copies none of them. Local.

        Write rows into it, in place, and give it, or its first rows, to `dispatch` as x: what is left to publish is
        their routing. That dispatch has to be the next op of this buffer; after any op the tensor is refused, on every
        rank, and what lies in it is unspecified. Ask again for each dispatch. On a GPU, write it on the stream of the
        ops. Not for training: a dispatch that gradients are recorded of refuses it. Under torch.compile it is memory
        like any other, whose rows are copied, since a graph writes to what it is given at its end.

        Args:
            num_tokens: rows, in [0, num_max_tokens_per_rank].

        Returns:
            [num_tokens, H] of the buffer's dtype, uninitialised; contiguous where a row's bytes are a multiple of 64.

        Raises:
            InvalidInput: num_tokens is out of range.
            InvalidConfig: the buffer has a dispatch_dtype, whose codes are made on the way into the window; or the
                stream is being captured into a CUDA graph, or an op of this buffer was.
            PeerDead, PeerTimeout, GroupPoisoned, GroupClosed: the group is over.
        """
        if is_dynamo_compiling():
            return _rows_for_a_graph(self._engine, num_tokens)
        compiler = set_eval_frame(None)  # of the code that a broken graph leaves; it would look into C++ below
        try:
            return self._engine.token_window(num_tokens, compiled=compiler is not None)
        finally:
            set_eval_frame(compiler)

    def check(self) -> None:
        """Raises what has ended the group, if anything has. Local; never blocks."""
        self._engine.health()

    def timings(self) -> dict[str, Any]:
        """Where this rank's time went in the last op, in nanoseconds: costs nothing to keep.

        Returns:
            op; before_ns (publish or push), wait_ns, after_ns (gather or reduce); arrival_ns: for each peer, how long
            after this rank began to wait it saw the peer's signal, looking at peers in rank order; line_latency_ns: for
            each peer, how long a cache line takes to read that it has just written: 10 to 20 if both share a cache, 100
            and more if not. Each dispatch looks at one peer and believes at most half as much again as before.
        """
        return self._engine.timings()

    def waited_ns(self) -> list[int]:
        """How long this rank has waited for each peer since the buffer was made, in nanoseconds, [R].

        Peers are looked at in rank order, so a wait counts for the first one that is late. Empty on CUDA ranks, whose
        host does not watch.
        """
        return self._engine.waited_ns()

    def report(self) -> Report:
        """What every rank of the group does and whom it waits for, also while this or another rank is in an op.

        Local: read from the segments, so that ranks which hang or are dead are in it. CPU ranks only. Errors of a wait
        in vain carry one as `report`; docs/diagnostics.md explains it.

        Raises:
            GroupClosed: this rank has closed the buffer, and with it its view of the others.
            InvalidConfig: a CUDA buffer.
        """
        return self._engine.report()
