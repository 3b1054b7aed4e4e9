"""What dispatch returns besides rows: everything combine and both backwards need to find the way back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_rt import _engine


@dataclass(kw_only=True, slots=True)
class Handle:
    """Routing of one dispatch, in private memory: it stays valid while later ops reuse the windows.

    Attributes:
        offs: int32 [L], inclusive cumulative rows per local expert, or [R], per source rank, with layout="tokens"; rows
            past offs[-1] are unspecified.
        recv_plan: int32, opaque: which rows belong to which pulled token.
        send_plan: int32 [T, K], opaque: where each top-k entry of this rank's tokens went.
        tag: the layer tag given to dispatch; combine must carry the same.
        recv_topk_idx: with layout="tokens", int32 [capacity, K]: which local experts each row is for, in the places of
            the source's topk_idx; -1 where that names none of this rank, or names one again. Otherwise None.
    """

    offs: Tensor
    recv_plan: Tensor
    send_plan: Tensor
    tag: int
    recv_topk_idx: Tensor | None = None

    @property
    def num_recv_tokens_per_expert(self) -> Tensor:
        """int32 [L] on the device: rows that each local expert received; with layout="tokens" [R], of each source."""
        return self.offs.diff(prepend=self.offs.new_zeros(1))

    @property
    def num_dropped(self) -> Tensor:
        """int32 scalar on the device: rows beyond capacity that this rank did not take (overflow="drop")."""
        return self.recv_plan[_engine.RecvPlan.num_dropped]
