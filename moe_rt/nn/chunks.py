"""A layer's batch in chunks: while the experts compute one, the next is dispatched and the one before is combined.

One op is under way. The experts of a chunk hide the dispatch of the next one and, from the moment at which they are
half-way (`half_way`), the combine of the one before. Autograd runs nodes in the reverse order, so backward overlaps in
the same way: the second half of an op is a node whose backward begins, and the first half one whose backward waits.

All ranks run the ops in one order: dispatch 0, 1 and 2, combine 0, dispatch 3, combine 1, and so on. A rank whose ops
must be whole, as in a compiled graph or under the profiler, runs whole ops in this order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.buffer.replicas import refuse_replicated_experts
from moe_rt.nn import overlap
from moe_rt.ops.declare import unwatched

_thread = threading.local()
# Over 1 Gbit/s two chunks gained when a rank's rows had this many bytes, and lost with a quarter of them
# (docs/howto/overlap.md).
_BYTES_THAT_GAIN, _CHUNKS_THAT_GAIN = 8 << 20, 2


def half_way() -> None:
    """Let another op take its turn. Experts call it between their products."""
    if is_dynamo_compiling():
        return
    turn, _thread.turn = getattr(_thread, "turn", None), None
    if turn is not None:
        turn()


class Chunk:
    """Consecutive tokens of a batch on their way through dispatch, experts and combine; ops are in halves if `split`.

    Attributes:
        recv_x, recv_weights, handle: results of dispatch, after `end_dispatch`.
        y: the experts' rows, which the caller sets.
        out: result of combine, after `end_combine`.
    """

    recv_x: Tensor
    recv_weights: Tensor
    handle: Handle
    y: Tensor
    out: Tensor

    def __init__(self, buffer: Buffer, tag: int, batch: Sequence[Tensor], max_tokens: int, split: bool) -> None:
        self.buffer, self.tag, self._batch, self._most, self.split = buffer, tag, batch, max_tokens, split

    def begin_dispatch(self) -> None:
        rows, idx, weights = self._batch
        if not self.split:
            received = self.buffer.dispatch(rows, idx, weights, tag=self.tag, max_tokens=self._most)
            self.recv_x, self.recv_weights, self.handle = received
            return
        self.buffer._engine.refuse_recorded_window(self.tag, rows)
        self._exchange = overlap.Exchange(self.buffer, self.tag)
        self._given = overlap.DispatchFinish.apply(rows, weights.to(self.buffer.spec.acc_dtype), self._exchange)
        with torch.no_grad():
            rows, weights = self._given
            pending = self.buffer.dispatch(rows, idx, weights, tag=self.tag, max_tokens=self._most, wait=False)
        self._exchange.receive = pending.wait

    def end_dispatch(self) -> None:
        if self.split:
            self.recv_x, self.recv_weights = overlap.DispatchBegin.apply(*self._given, self._exchange)
            self.handle = self._exchange.handle
            del self._exchange.handle

    def begin_combine(self) -> None:
        if not self.split:
            self.out = self.buffer.combine(self.y, self.recv_weights, self.handle)
            return
        refuse_replicated_experts(self.buffer, self.y)
        self._exchange = overlap.Exchange(self.buffer, self.tag)
        self._given = overlap.CombineFinish.apply(self.y, self.recv_weights, self._exchange)
        with torch.no_grad():
            y, recv_weights = self._given
            self._exchange.receive = self.buffer.combine(y, recv_weights, self.handle, wait=False).wait

    def end_combine(self) -> None:
        if self.split:
            self.out = overlap.CombineBegin.apply(*self._given, self.handle.recv_plan, self._exchange)


def run(
    buffer: Buffer,
    tag: int,
    batch: tuple[Tensor, Tensor, Tensor],
    num_chunks: int,
    experts: Callable[[Chunk], Tensor],
    *,
    calls_half_way: bool,
) -> list[Chunk]:
    """Dispatch a batch in chunks, run the experts on each, and combine. Collective.

    Args:
        batch: rows [T, H], topk_idx [T, K], topk_weights [T, K]. The sizes of chunks differ by one token at most.
        num_chunks: at least 2.
        experts: runs the experts on a chunk's recv_x and returns y.
        calls_half_way: the experts call `half_way`, and nothing runs them again in backward.

    Returns:
        The chunks, in the order of tokens.
    """
    split, num_tokens = unwatched(*batch), len(batch[0])
    if num_tokens > buffer.spec.num_max_tokens_per_rank:
        rows, idx, weights = batch
        buffer.dispatch(rows, idx, weights, tag=tag)  # refuses the batch on every rank, and names the batch's size
    ends = [num_tokens * i // num_chunks for i in range(num_chunks + 1)]
    most = -(-buffer.spec.num_max_tokens_per_rank // num_chunks)
    chunks = [Chunk(buffer, tag, [t[ends[i] : ends[i + 1]] for t in batch], most, split) for i in range(num_chunks)]
    chunks[0].begin_dispatch()
    chunks[0].end_dispatch()
    for i, chunk in enumerate(chunks):
        after, before = chunks[i + 1 : i + 2], chunks[i - 1 : i] if i else []
        turns = [(c.begin_dispatch, c.end_dispatch) for c in after] + [(c.begin_combine, c.end_combine) for c in before]
        _compute_during(turns, chunk, experts, calls_half_way and split)
    chunks[-1].begin_combine()
    chunks[-1].end_combine()
    return chunks


def _compute_during(
    turns: list[tuple[Callable[[], None], Callable[[], None]]],
    chunk: Chunk,
    experts: Callable[[Chunk], Tensor],
    calls_half_way: bool,
) -> None:
    """Run the experts while the ops of `turns`, one or two, are under way, one after the other."""
    (begin, end), *others = turns

    def turn() -> None:
        nonlocal end
        end()
        begin, end = others.pop()
        begin()

    begin()
    if others and calls_half_way:
        _thread.turn = turn
        try:
            chunk.y = experts(chunk)
        finally:
            _thread.turn = None
    else:
        chunk.y = experts(chunk)
    if others:
        turn()
    end()


def number(wanted: int | Literal["auto"], buffer: Buffer) -> int:
    """Return the number of chunks, which is the same on all ranks."""
    if wanted != "auto":
        return wanted
    row_bytes = buffer.spec.hidden * buffer.spec.dtype.itemsize
    gains = overlap.over_network(buffer) and buffer.spec.num_max_tokens_per_rank * row_bytes >= _BYTES_THAT_GAIN
    return _CHUNKS_THAT_GAIN if gains else 1


def runs_once(experts: nn.Module) -> bool:
    """Return whether the module's forward is that of its class, and no hook or wrapper runs it again in backward."""
    return not (experts._forward_pre_hooks or experts._forward_hooks or "forward" in vars(experts))
