"""The handle of a dispatch: the routing that combine and both backward ops need."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.errors import InvalidConfig

PLAN_HEAD, PLAN_PULLED = 12, 4  # 32-bit words of RecvPlan::Head and of Pulled, whose first word is the source token


@dataclass(kw_only=True, slots=True, repr=False)
class Handle:
    """Routing of one dispatch, in private memory: it stays valid while later ops reuse the windows.

    Attributes:
        offs: int32 [L], inclusive cumulative row counts per local expert; with layout="tokens", int32 [R], per source
            rank. Rows past offs[-1] are unspecified.
        recv_plan: int32, opaque: maps rows to received tokens.
        send_plan: int32 [T, K], opaque: destination of each top-k entry of this rank's tokens.
        tag: the layer tag given to dispatch.
        recv_topk_idx: with layout="tokens", int32 [capacity, K]: local experts of each row, at the positions of the
            source's topk_idx; -1 for an entry that names an expert of another rank or repeats one. Rows past offs[-1]
            are unspecified. Otherwise None.
        real_ends: value of `ends` with an expert_alignment or, with 1 or layout="tokens", None.
    """

    offs: Tensor
    recv_plan: Tensor
    send_plan: Tensor
    tag: int
    recv_topk_idx: Tensor | None = None
    real_ends: Tensor | None = None

    def __repr__(self) -> str:
        """Return the tag and the tensors' shapes. No value is read from the device, so the host does not wait."""
        there = {field.name: getattr(self, field.name) for field in fields(self)}
        shapes = [f"{name}={list(value.shape)}" for name, value in there.items() if isinstance(value, Tensor)]
        return f"Handle(tag={self.tag}, {', '.join(shapes)}, device={str(self.offs.device)!r})"

    @property
    def ends(self) -> Tensor:
        """int32 [L] on the device: end of each local expert's rows; padding follows, up to offs."""
        return self.offs if self.real_ends is None else self.real_ends

    def row_experts(self, num_rows: int) -> Tensor:
        """Return int32 [num_rows] on the device: local expert of each row of recv_x; -1 for padding and unused rows.

        Raises:
            InvalidConfig: the layout is "tokens".
        """
        self._require_rows_of_experts("row_experts")
        rows = torch.arange(num_rows, dtype=torch.int32, device=self.offs.device)
        experts = torch.searchsorted(self.offs, rows, right=True, out_int32=True)
        last = len(self.offs) - 1
        return torch.where((experts <= last) & (rows < self.ends[experts.clamp(max=last)]), experts, -1)

    def _require_rows_of_experts(self, name: str) -> None:
        if self.recv_topk_idx is not None:
            expected = "recv_topk_idx, which has the experts of each row"
            raise InvalidConfig(f'handle.{name}: got rows of tokens (layout="tokens"), expected {expected}')

    @property
    def source_tokens(self) -> Tensor:
        """int32 [capacity] on the device: with layout="tokens", index of each row's token at its source rank.

        Rows past offs[-1] are unspecified.

        Raises:
            InvalidConfig: the layout is "experts".
        """
        if self.recv_topk_idx is None:
            expected = 'layout="tokens", whose rows are tokens'
            raise InvalidConfig(f'handle.source_tokens: got rows of experts (layout="experts"), expected {expected}')
        pulled = self.recv_plan[PLAN_HEAD : PLAN_HEAD + PLAN_PULLED * len(self.recv_topk_idx)]
        return pulled.view(-1, PLAN_PULLED)[:, 0]

    @property
    def num_recv_tokens_per_expert(self) -> Tensor:
        """int32 [L] on the device: rows received by each local expert. Raises InvalidConfig with layout="tokens"."""
        self._require_rows_of_experts("num_recv_tokens_per_expert")
        return self.ends - torch.nn.functional.pad(self.offs[:-1], (1, 0))

    @property
    def num_dropped(self) -> Tensor:
        """int32 scalar on the device: rows beyond capacity that this rank dropped (overflow="drop")."""
        return self.recv_plan[_engine.RecvPlan.num_dropped]
