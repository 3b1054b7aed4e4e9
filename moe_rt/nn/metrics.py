"""Counters that a layer keeps on the device, and the one method in which the host reads them."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._subclasses.fake_tensor import FakeTensor

from moe_rt.buffer.handle import Handle
from moe_rt.buffer.pool import LayerBuffers

# Two threads may run one layer through two buffers, and an in-place sum is not atomic.
_adding = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class MetricsSnapshot:
    """Counts of one rank since its layer was made.

    Attributes:
        tokens_per_expert: [E], top-k entries of this rank's tokens.
        rows_dropped: rows beyond this rank's capacity (overflow="drop").
        forwards: forwards that ran, including evaluation and the recomputation of activation checkpointing.
        waited_ns: nanoseconds waited for each peer, see `moe_rt.Buffer.waited_ns`, in the layer's own buffers, which
            other layers may share.
    """

    tokens_per_expert: list[int]
    rows_dropped: int
    forwards: int
    waited_ns: list[int]


class LayerMetrics:
    """Running counts of one layer, in int64 tensors on its device."""

    def __init__(self, num_experts: int, buffers: LayerBuffers) -> None:
        self._buffers, device = buffers, buffers.current.device
        self._drops = buffers.current.spec.overflow == "drop"
        with torch.inference_mode(False):  # tensors made in inference mode cannot be updated outside it
            self._tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)
            self._dropped = torch.zeros((), dtype=torch.int64, device=device)
            self._forwards = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, tokens_per_expert: Tensor, handle: Handle | None = None) -> None:
        """Count a forward: its router's tokens_per_expert, int64 [E], and its dropped rows. The host does not wait."""
        # Fake tensors have no values to count, and tensors of a functorch transform must not leave it.
        if isinstance(tokens_per_expert, FakeTensor) or _are_functorch_transforms_active():
            return
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _adding:
            self._tokens += tokens_per_expert
            self._forwards += 1
        if handle is not None:
            self.add_dropped(handle)

    def add_dropped(self, handle: Handle) -> None:
        """Count the dropped rows of one of a forward's dispatches."""
        if not self._drops or isinstance(handle.offs, FakeTensor) or _are_functorch_transforms_active():
            return
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _adding:
            self._dropped += handle.num_dropped

    def snapshot(self) -> MetricsSnapshot:
        """Return the counts so far. The host reads them, so on a GPU it waits for the stream."""
        *tokens, dropped, forwards = torch.cat([self._tokens, torch.stack([self._dropped, self._forwards])]).tolist()
        return MetricsSnapshot(
            tokens_per_expert=tokens, rows_dropped=dropped, forwards=forwards, waited_ns=self._buffers.waited_ns()
        )
