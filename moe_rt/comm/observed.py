"""Read-only part of a buffer: its sizes, the state of its group, and timings. Nothing here is collective."""

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


@_disable_dynamo  # an explicit graph break: dynamo warns of the breaks that it finds itself
def _rows_for_a_graph(engine: Engine, num_tokens: int) -> Tensor:
    return engine.token_window(num_tokens, compiled=True)


class Observed:
    """Properties and local methods of `moe_rt.Buffer`."""

    spec: BufferSpec
    rank: int
    _engine: Engine

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self._engine.device

    @property
    def capacity(self) -> int:
        """Number of rows of recv_x on this rank; grows with overflow="retry"."""
        return self._engine.capacity

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank (L)."""
        return self.spec.placement.num_local(self.rank)

    @property
    def topology(self) -> Topology:
        """Node of each rank."""
        return self.spec.topology

    @property
    def route(self) -> Route:
        """Path of rows between nodes: "flat" or "two_level"."""
        return "two_level" if self.spec.route == "two_level" else "flat"

    @property
    def num_bytes(self) -> int:
        """Size of this rank's symmetric memory in bytes; docs/protocol.md has the formula."""
        return self._engine.shape.segment_bytes()

    def token_window(self, num_tokens: int) -> Tensor:
        """Return memory for the rows of the next dispatch, so that it copies none of them. Local.

        Write rows into the tensor in place and pass it, or its first rows, to `dispatch` as x; only their routing is
        then left to publish. That dispatch must be the next op of this buffer. After any op the tensor is refused, on
        every rank, and its contents are unspecified; ask again for each dispatch. On a GPU, write it on the stream of
        the ops. It is not for training: a dispatch with recorded gradients refuses it. Under torch.compile it is
        ordinary memory, whose rows are copied, because a graph writes to its inputs only at its end.

        Args:
            num_tokens: number of rows, in [0, num_max_tokens_per_rank].

        Returns:
            [num_tokens, H] of the buffer's dtype, uninitialised; contiguous if a row's size is a multiple of 64 bytes.

        Raises:
            InvalidInput: num_tokens is out of range.
            InvalidConfig: the buffer has a dispatch_dtype, because codes are written into the window by the op; or the
                stream is being captured into a CUDA graph, or an op of this buffer was.
            PeerDead, PeerTimeout, GroupPoisoned, GroupClosed: the group is over.
        """
        if is_dynamo_compiling():
            return _rows_for_a_graph(self._engine, num_tokens)
        compiler = set_eval_frame(None)  # dynamo must not trace into the calls below
        try:
            return self._engine.token_window(num_tokens, compiled=compiler is not None)
        finally:
            set_eval_frame(compiler)

    def check(self) -> None:
        """Raise the error that ended the group, if any. Local; never blocks."""
        self._engine.health()

    def timings(self) -> dict[str, Any]:
        """Durations of the phases of this rank's last op, in nanoseconds.

        Returns:
            op; before_ns (publish or push), wait_ns, after_ns (gather or reduce); arrival_ns: for each peer, time from
            the begin of this rank's wait until it observed the peer's signal, checking peers in rank order;
            line_latency_ns: for each peer, time to read a cache line that the peer has just written: 10 to 20 if both
            share a cache, 100 and more if not. Each dispatch measures one peer; an estimate grows by at most half.
        """
        return self._engine.timings()

    def waited_ns(self) -> list[int]:
        """Time that this rank has waited for each peer since the buffer was made, in nanoseconds, [R].

        Peers are checked in rank order, so a wait counts for the first one that is late. Empty on CUDA ranks, whose
        waits run on the device.
        """
        return self._engine.waited_ns()

    def report(self) -> Report:
        """Report what every rank of the group does and which rank it waits for, also while ranks are inside an op.

        Local: it is read from the segments, so it includes ranks that hang or are dead. CPU ranks only. Errors of a
        failed wait have one as their attribute `report`; docs/diagnostics.md explains it.

        Raises:
            GroupClosed: this rank has closed the buffer, and with it its view of the others.
            InvalidConfig: the buffer's ranks are on GPUs.
        """
        return self._engine.report()
