"""Finds padding in a Transformers model: tokens that no token attends to, including themselves.

Experts get no mask. The attention of their layer gets one, and it runs before them, also when activation checkpointing
recomputes. So its mask is used. Nothing here waits for the device.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed import mixin as _mixin

_NAME = "_moe_rt_attended"
mixin: Any = _mixin  # typed Any, because it does not export the replaced name


class Attended:
    """Mask of the attention that has run since one experts module ran last.

    Once the experts have run without an attention before them, as in a layer that runs experts first, no mask is used
    any more: it could be another batch's.
    """

    def __init__(self, experts: nn.Module) -> None:
        self._usable = True
        self._seen = False
        self._mask: Tensor | None = None
        setattr(experts, _NAME, self)

    def see(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the mask; a forward pre-hook of the attention."""
        self._seen, self._mask = True, kwargs.get("attention_mask")

    def real(self, num_tokens: int) -> Tensor | None:
        """Return bool [T], False for padding; None without a mask of exactly these tokens."""
        mask, self._mask = self._mask, None
        self._usable = self._usable and self._seen
        self._seen = False
        attended = _attended(mask) if self._usable and isinstance(mask, Tensor) else None
        return attended if attended is not None and len(attended) == num_tokens else None


@torch.no_grad()
def _attended(mask: Tensor) -> Tensor | None:
    """Return bool [T], True for tokens that any token attends to.

    mask is [B, S] or [B, heads or 1, S, S], bool or additive; the result is None for other shapes.
    """
    if mask.dim() == 4 and mask.shape[2] == mask.shape[3] > 0:  # square, so no cached tokens
        mask = mask.amax((1, 2))
        mask = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    return mask.flatten() != 0 if mask.dim() == 2 else None


def watch_attention(model: nn.Module) -> None:
    """Connect every Attended in the model to the attention of its experts' layer.

    If a layer has no attention (experts in separate blocks) or several, padding stays unknown.
    """
    modules = dict(model.named_modules())
    for name, experts in modules.items():
        attended = getattr(experts, _NAME, None)
        attention = None if attended is None else _attention_around(name, modules)
        if attended is not None and attention is not None:
            attention.register_forward_pre_hook(attended.see, with_kwargs=True)


def _attention_around(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Return the one child that takes a mask, in the nearest module around the experts that has such children."""
    while name:
        name = name.rpartition(".")[0]
        if isinstance(modules[name], nn.ModuleList):
            return None
        found = [child for child in modules[name].children() if _takes_attention_mask(child)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _takes_attention_mask(module: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(type(module).forward).parameters


def watch_new_models() -> None:
    """Make Transformers call watch_attention for every model whose experts it spreads from now on."""
    spread = getattr(mixin, "apply_expert_parallelism", None)
    if spread is None:  # a release without this name: padding is sent like any token
        return

    @wraps(spread)
    def spread_and_watch(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        spread_model = spread(model, *args, **kwargs)
        watch_attention(spread_model)
        return spread_model

    mixin.apply_expert_parallelism = spread_and_watch
