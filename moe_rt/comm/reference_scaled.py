"""Reference implementation for rows with scales: codes and scales are selected like the rows of a plain dispatch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_rt.comm import reference, reference_tokens
from moe_rt.config.spec import BufferSpec


def dispatch(
    sent: list[tuple[Tensor, Tensor]],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor],
    spec: BufferSpec,
    max_tokens: int | None = None,
) -> list[reference.Received]:
    """Dispatch (codes, scales) in the layout of the spec; recv_x holds codes, recv_scales their scales."""
    plain = [torch.zeros(len(codes), spec.hidden, dtype=spec.dtype) for codes, _ in sent]
    by_layout = reference_tokens.dispatch if spec.by_token else reference.dispatch
    received = by_layout(plain, topk_idx, topk_weights, spec, max_tokens)
    codes, scales = ([pair[part] for pair in sent] for part in (0, 1))
    return [replace(r, recv_x=_taken(codes, r), recv_scales=_taken(scales, r)) for r in received]


def _taken(sent: list[Tensor], received: reference.Received) -> Tensor:
    """Select one rank's received rows from the tensors of all ranks; padding is zero."""
    zero = torch.zeros(sent[0].shape[1:], dtype=sent[0].dtype)
    rows = [sent[row.source][row.token] if row.source >= 0 else zero for row in received.kept]
    return reference.stacked(rows, zero)
