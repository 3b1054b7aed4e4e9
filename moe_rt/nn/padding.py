"""Determines which tokens of an input are real, and keeps padding from being routed, counted and differentiated.

A set of real tokens is a bool tensor of the input's leading shape, or None if all are real. The host does not read it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from moe_rt.errors import InvalidInput
from moe_rt.nn.router_losses import RouterAux, count_tokens

# Fills the row of recorded experts of a real token that no expert took (expert choice). A row of only -1 is padding.
UNTAKEN = -2


def real_tokens(x: Tensor, topk_idx: Tensor | None, mask: Tensor | None, num_topk: int) -> Tensor | None:
    """Return the tokens that `mask` marks as real and whose row of `topk_idx`, if given, is not all -1.

    Args:
        x: [..., H].
        topk_idx: integer [T, K].
        mask: bool or integer [...], zero or False for padding.
        num_topk: K.

    Returns:
        bool [...], or None if mask and topk_idx are None.

    Raises:
        InvalidInput: mask or topk_idx has another type, shape or device.
    """
    real = None if mask is None else _as_bool(mask, x)
    if topk_idx is None:
        return real
    _require_ids(topk_idx, x, num_topk)
    named = (topk_idx.to(torch.int64) != -1).any(-1).reshape(x.shape[:-1])
    return named if real is None else named & real


def _require_ids(topk_idx: Any, x: Tensor, num_topk: int) -> None:
    expected = [x.shape[:-1].numel(), num_topk]
    if not isinstance(topk_idx, Tensor):
        raise InvalidInput(f"topk_idx: got {type(topk_idx).__name__}, expected an integer tensor {expected}")
    if list(topk_idx.shape) != expected:
        raise InvalidInput(f"topk_idx: got shape {list(topk_idx.shape)}, expected {expected}")
    if topk_idx.dtype is torch.bool or not _counts(topk_idx) or topk_idx.device != x.device:
        got = f"{topk_idx.dtype} on {topk_idx.device}"
        raise InvalidInput(f"topk_idx: got {got}, expected integers on {x.device}")


def _counts(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex()


def _as_bool(mask: Any, x: Tensor) -> Tensor:
    expected = f"bool or integer {list(x.shape[:-1])} on {x.device}, True or 1 for a real token"
    if not isinstance(mask, Tensor):
        raise InvalidInput(f"mask: got {type(mask).__name__}, expected {expected}")
    # A floating mask would be additive, where 0 marks a real token.
    if not _counts(mask) or mask.shape != x.shape[:-1] or mask.device != x.device:
        raise InvalidInput(f"mask: got {mask.dtype} {list(mask.shape)} on {mask.device}, expected {expected}")
    return mask.to(torch.bool)


def without_padding(t: Tensor, real: Tensor | None, value: float = 0) -> Tensor:
    """Return t [..., N] with `value` in rows of padding, even where t is NaN. Their gradient is exactly zero."""
    return t if real is None else t.masked_fill(~real.unsqueeze(-1), value)


def takes_mask(kind: Any) -> bool:
    """True if the forward of a router's class has a parameter `mask` or takes arbitrary keyword arguments."""
    parameters = inspect.signature(kind.forward).parameters
    return "mask" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# Equals torch.compiler.assume_constant_result; see moe_rt/integrations/exchange.py.
takes_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def route(router: Any, x: Tensor, topk_idx: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor, Any]:
    """Call `router` on x. See `moe_rt.nn.protocols.RouterLike` for routers that do not take a mask."""
    if real is None:
        return router(x, topk_idx)
    if takes_mask(type(router)):
        return router(x, topk_idx, mask=real)
    idx, weights, aux = router(x, topk_idx)
    _require_ids(idx, x, router.num_topk)
    idx = without_padding(idx, real.flatten(), -1)
    if isinstance(aux, RouterAux):
        load = count_tokens(idx.flatten().to(torch.int64), router.num_experts)
        aux = aux._replace(tokens_per_expert=load, topk_idx=idx)
    return idx, weights, aux
