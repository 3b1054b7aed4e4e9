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
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.buffer.replicas import refuse_replicated_experts
from moe_rt.nn import overlap
from moe_rt.ops.declare import unwatched
from moe_rt.ops.late_weights import LateWeights

_thread = threading.local()
# Over 1 Gbit/s chunks gained from this many bytes of a rank's rows on, if experts had at least as many rows as they are
# wide: each further chunk reads all weights again (docs/howto/overlap.md).
_BYTES_THAT_GAIN, _CHUNKS_THAT_GAIN = 4 << 20, 3


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
        place: place of the experts' weights in backward, after `end_dispatch`; None for the usual one.
        y: the experts' rows, which the caller sets.
        out: result of combine, after `end_combine`.
    """

    recv_x: Tensor
    recv_weights: Tensor
    handle: Handle
    place: int | None = None
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
            self.place = overlap.free_place(self._given[0])
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
    meanwhile: Callable[[], object] | None,
    make_weights: Callable[[], object] | None,
    calls_half_way: bool,
    shares_weights: bool,
    has_late_weights: bool,
) -> list[Chunk]:
    """Dispatch a batch in chunks, run the experts on each, and combine. Collective.

    Args:
        batch: rows [T, H], topk_idx [T, K], topk_weights [T, K].
        num_chunks: at least 2.
        experts: runs the experts on a chunk's recv_x and returns y.
        meanwhile: runs while the first chunk is dispatched.
        make_weights: makes the weights that `shares_weights` speaks of.
        calls_half_way: the experts call `half_way`, and nothing runs them again in backward.
        shares_weights: they may use the weights of the first chunk for all, so that means of their gradients over
            ranks are taken once. All ranks do so or none.
        has_late_weights: nothing reads gradients of weights before backward ends.

    Returns:
        The chunks, in the order of tokens.
    """
    split, num_tokens = unwatched(*batch), len(batch[0])
    if num_tokens > buffer.spec.num_max_tokens_per_rank:
        rows, idx, weights = batch
        buffer.dispatch(rows, idx, weights, tag=tag)  # refuses the batch on every rank, and names the batch's size
    most = buffer.spec.num_max_tokens_per_rank
    chunks = [
        Chunk(buffer, tag, [t[start:end] for t in batch], _size(most, i, num_chunks), split)
        for i, (start, end) in enumerate(pairwise(_ends(num_tokens, num_chunks)))
    ]
    shared = LateWeights(late=has_late_weights and split) if shares_weights else None
    if make_weights is not None and not split:
        # Backward then takes their means after all exchanges. Other ranks wait for these before theirs, except for the
        # last exchange, so means before them could wait for each other in a circle.
        with overlap.weights_of(shared):
            make_weights()
    chunks[0].begin_dispatch()
    if meanwhile is not None:
        meanwhile()
    chunks[0].end_dispatch()
    if shared is not None:
        shared.place = chunks[0].place
    with overlap.weights_of(shared):
        for i, chunk in enumerate(chunks):
            after, before = chunks[i + 1 : i + 2], chunks[i - 1 : i] if i else []
            turns = [(c.begin_dispatch, c.end_dispatch) for c in after]
            turns += [(c.begin_combine, c.end_combine) for c in before]
            _compute_during(turns, chunk, experts, calls_half_way and split)
    chunks[-1].begin_combine()
    chunks[-1].end_combine()
    return chunks


def _ends(num_tokens: int, num_chunks: int) -> list[int]:
    """Return where chunks end, 0 first. The first and the last one are half as large as those between: their dispatch
    and their combine are hidden by nothing."""
    halves = 2 * (num_chunks - 1)
    return [0, *(num_tokens * i // halves for i in range(1, halves, 2)), num_tokens]


def _size(num_tokens: int, chunk: int, num_chunks: int) -> int:
    """Return the most tokens of a chunk of `_ends`, of a batch of at most num_tokens."""
    return -(-num_tokens // (2 * (num_chunks - 1) if chunk in (0, num_chunks - 1) else num_chunks - 1))


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


def number(wanted: int | Literal["auto"], buffer: Buffer, intermediate: int) -> int:
    """Return the number of chunks for experts of this width, which is the same on all ranks."""
    if wanted != "auto":
        return wanted
    spec = buffer.spec
    row_bytes = spec.hidden * spec.dtype.itemsize
    rows_per_expert = spec.num_max_tokens_per_rank * spec.num_ranks * spec.num_topk / spec.num_experts
    has_work = spec.num_max_tokens_per_rank * row_bytes >= _BYTES_THAT_GAIN and rows_per_expert >= intermediate
    return _CHUNKS_THAT_GAIN if has_work and overlap.over_network(buffer) else 1


def runs_once(experts: nn.Module) -> bool:
    """Return whether the module's forward is that of its class, and no hook or wrapper runs it again in backward."""
    return not (experts._forward_pre_hooks or experts._forward_hooks or "forward" in vars(experts))
