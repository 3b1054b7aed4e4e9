"""torch's Linear, RMSNorm and Embedding for batches [B, S, ...] on CPUs, with the same bits on any number of ranks.

Outputs and gradients of a row depend only on that row. Gradients of weights are summed for each sequence, then by the
tree of `moe_rt.ops.tree_sums`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.ops.grouped import row_wise_linear
from moe_rt.ops.tree_sums import for_each_sequence


class Linear(nn.Linear):
    """nn.Linear: x [B, S, in] -> [B, S, out]."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compute in autocast's dtype if it is on, else in x's.

        Args:
            weight: [B, out, in] of `for_each_sequence`, in place of the module's own.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return row_wise_linear(x.to(dtype), self.weight if weight is None else weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dimension: x [B, S, H] -> [B, S, H]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row, and scale it."""
        y = F.rms_norm(x, self.weight.shape, eps=self.eps)
        return y * for_each_sequence(self.weight, len(x)).unsqueeze(1)


class Embedding(nn.Embedding):
    """nn.Embedding: ids [B, S] -> [B, S, H]."""

    def forward(self, ids: Tensor, weight: Tensor | None = None) -> Tensor:
        """Look ids up.

        Args:
            weight: [B, V, H] of `for_each_sequence`, in place of the module's own.
        """
        weight = for_each_sequence(self.weight, len(ids)) if weight is None else weight
        return torch.stack([F.embedding(own, table) for own, table in zip(ids, weight.unbind(), strict=True)])
