"""The buffers of moe_rt under one deep_ep.Buffer: one for each row size and routing, which grow with the tokens.

DeepEP's buffer takes rows of any size and any number of tokens; moe_rt's are made for one size and a bound of tokens.
All ranks agree on a size before they make a buffer for it, and on a larger bound when a rank has more tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.compat.deep_ep.operands import parts_of
from moe_rt.config.options import RecvLayout, Sums
from moe_rt.errors import ConfigMismatch, InvalidInput, MoeRtError, Op, TooManyTokens
from moe_rt.group.groups import Group, rendezvous_of
from moe_rt.group.rendezvous import all_gather_records

_NEW_SIZE_TAG = 1  # announces that this rank goes on to make a buffer; rows travel with tag 0
_FEWEST_TOKENS = 32
P = ParamSpec("P")
R = TypeVar("R")


class Rows(NamedTuple):
    """Size and routing of the rows that a buffer exchanges."""

    layout: RecvLayout
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype
    sums: Sums = "ranked"


class Received(NamedTuple):
    """Result of a dispatch as moe_rt.Buffer.dispatch returns it, and the buffer that combines its rows."""

    x: Any
    weights: Tensor
    handle: Handle
    buffer: Buffer

    @property
    def ids(self) -> Tensor:
        """The handle's recv_topk_idx, which is made when it is first needed."""
        if self.handle.recv_topk_idx is None:
            self.buffer._attach_views(self.handle, self.weights)
        assert self.handle.recv_topk_idx is not None
        return self.handle.recv_topk_idx


class Exchange:
    """One rank's buffers. All methods but `refuse_alone` are collective.

    Args:
        group: the group of all buffers.
        timeout_s: seconds that an op, or the making of a buffer, waits for a peer.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._rendezvous = rendezvous_of(group)
        self.rank, self.num_ranks = self._rendezvous.rank, self._rendezvous.size
        self._buffers: dict[Rows, Buffer] = {}
        self._outgrown: list[Buffer] = []  # handles of their dispatches are still combined
        self._latest: Buffer | None = None

    def dispatch(
        self, rows: Rows, x: Any, topk_idx: Tensor, weights: Tensor, max_tokens: int | None = None
    ) -> Received:
        """Dispatch x as moe_rt.Buffer.dispatch, through a buffer that is made or enlarged if necessary.

        Args:
            x: the rows, their (codes, scales), or a function that writes rows to the tensor [T, hidden] that it gets.
            max_tokens: bound that all ranks gave; None if each rank may have any number of tokens.
        """
        buffer = self.buffer(rows, topk_idx.shape[0], max_tokens)
        try:
            return self._dispatch(buffer, x, topk_idx, weights, max_tokens)
        except TooManyTokens:  # all ranks raise it in this op
            if max_tokens is not None:
                raise
        buffer = self._latest = self._make(rows, len(topk_idx), None)
        return self._dispatch(buffer, x, topk_idx, weights, None)

    def buffer(self, rows: Rows, num_tokens: int, max_tokens: int | None) -> Buffer:
        """Return the buffer of such rows, made or enlarged if necessary, through which the caller runs the next op."""
        buffer = self._buffers.get(rows)
        if buffer is None or (max_tokens is not None and max_tokens > buffer.spec.num_max_tokens_per_rank):
            buffer = self._make(rows, num_tokens, max_tokens)
        self._latest = buffer
        return buffer

    def _dispatch(self, buffer: Buffer, x: Any, topk_idx: Tensor, weights: Tensor, most: int | None) -> Received:
        if callable(x):
            write, num_tokens, spec = x, len(topk_idx), buffer.spec
            if num_tokens <= spec.num_max_tokens_per_rank:
                x = buffer.token_window(num_tokens)
                write(x)
            else:  # dispatch refuses it, on every rank
                x = weights.new_empty(num_tokens, spec.hidden, dtype=spec.dtype)
        if weights.dtype is not torch.float32:  # another default dtype
            weights = weights.float()
        codes, scales = parts_of(x)
        # The engine itself: neither autograd nor torch's dispatcher sees ops of DeepEP.
        recv_x, recv_weights, offs, recv_plan, send_plan, *recv_scales = buffer._engine.dispatch(
            codes, topk_idx, weights, 0, most, scaled=scales is not None, scales=scales
        )
        handle = Handle(offs=offs, recv_plan=recv_plan, send_plan=send_plan, tag=0)
        return Received((recv_x, *recv_scales) if recv_scales else recv_x, recv_weights, handle, buffer)

    def of(self, rows: Rows | None) -> Buffer | None:
        """Return the buffer of such rows, or None. Local."""
        return None if rows is None else self._buffers.get(rows)

    def refuse(self, rows: Rows | None, error: MoeRtError, got: int = 0, expected: int = 0) -> NoReturn:
        """Raise `error` here, and the same kind of error on every peer, in place of a dispatch of such rows."""
        buffer = self._buffers.get(rows, self._latest) if rows is not None else self._latest
        if buffer is None:  # peers come to make one
            self._gather({"refused": str(error)})
            raise error
        buffer._engine._refuse(Op.DISPATCH, 0, error, got, expected)

    @staticmethod
    def refuse_combine(buffer: Buffer, error: MoeRtError) -> NoReturn:
        """Raise `error` here, and InvalidInput on every peer, in place of a combine."""
        buffer._engine._refuse(Op.COMBINE, 0, error, 0, 0)

    def _make(self, rows: Rows, num_tokens: int, bound: int | None) -> Buffer:
        """Agree on the rows and on a bound of tokens, and make a buffer for them.

        Raises:
            ConfigMismatch: ranks gave rows of different sizes; on every rank.
            CallOrderMismatch: a rank dispatches rows of an earlier size meanwhile; on every rank.
        """
        if self._latest is not None:
            spec = self._latest.spec
            none = torch.empty(0, spec.num_topk, device=self._latest.device)
            x = torch.empty(0, spec.hidden, dtype=spec.dtype, device=self._latest.device)
            self._latest.dispatch(x, none.long(), none, tag=_NEW_SIZE_TAG)
        mine = {**{name: str(value) for name, value in rows._asdict().items()}, "bound": bound}
        records = self._gather({**mine, "tokens": num_tokens})
        for peer, record in enumerate(records):
            if "refused" in record:
                message = f"rank {self.rank}: rank {peer} refused its input: {record['refused']}"
                raise InvalidInput(message, rank=self.rank, peer=peer)
        for peer, record in enumerate(records):
            for field in mine:
                if record.get(field) != records[0].get(field):
                    name = "num_max_dispatch_tokens_per_rank * num_topk" if field == "bound" else field
                    expected = f"{records[0].get(field)} as on rank 0"
                    message = f"{name}: got {record.get(field)} on rank {peer}, expected {expected}"
                    raise ConfigMismatch(message, rank=self.rank, peer=peer)
        most = max(_FEWEST_TOKENS, *(record["tokens"] for record in records)) if bound is None else bound
        if rows in self._buffers:
            self._outgrown.append(self._buffers[rows])
        self._buffers[rows] = Buffer(
            self._group,
            num_max_tokens_per_rank=1 << (most - 1).bit_length() if bound is None else most,
            timeout_s=self._timeout_s,
            init_timeout_s=self._timeout_s,
            **rows._asdict(),
        )
        return self._buffers[rows]

    def _gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        return all_gather_records(self._rendezvous, record, self._timeout_s, "make a buffer of deep_ep")

    @property
    def buffers(self) -> Sequence[Buffer]:
        """All buffers that were made and are still open."""
        return [*self._buffers.values(), *self._outgrown]

    def close(self) -> None:
        """Close all buffers. Local and idempotent."""
        for buffer in self.buffers:
            buffer.close()
        self._buffers, self._outgrown, self._latest = {}, [], None


def ungraded(op: Callable[P, R]) -> Callable[P, R]:
    """Return the op without autograd. torch.no_grad is entered only if gradients are recorded."""

    @functools.wraps(op)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return op(*arguments, **keywords)
        return op(*arguments, **keywords)

    return run
