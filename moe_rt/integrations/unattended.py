"""Finds tokens of a Transformers model that no token attends to, not even themselves: padding, which needs no expert.

Experts are called with tokens and get no mask. The attention of their layer gets one, and it runs before them, in
activation checkpointing's second pass too. So its mask is used. Nothing here waits for the device.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed import mixin as _mixin

_NAME = "_moe_rt_attended"
mixin: Any = _mixin  # It does not export what is replaced there.


class Attended:
    """Holds, for one experts module, the mask of the attention that has run since the experts ran last.

    Once experts have run without one before them, as in a layer that runs them first, no mask counts: what is there
    then could be of another batch.
    """

    def __init__(self, experts: nn.Module) -> None:
        self._usable = True
        self._seen = False
        self._mask: Tensor | None = None
        setattr(experts, _NAME, self)

    def see(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Takes the mask; a hook before the attention."""
        self._seen, self._mask = True, kwargs.get("attention_mask")

    def real(self, num_tokens: int) -> Tensor | None:
        """Returns bool [T], False for padding; None where there is no mask, or none of these tokens alone."""
        mask, self._mask = self._mask, None
        self._usable = self._usable and self._seen
        self._seen = False
        attended = _attended(mask) if self._usable and isinstance(mask, Tensor) else None
        return attended if attended is not None and len(attended) == num_tokens else None


@torch.no_grad()
def _attended(mask: Tensor) -> Tensor | None:
    """Returns whether any token attends to each: mask [B, S] or [B, heads or 1, S, S], bool or additive -> bool [T]."""
    if mask.dim() == 4 and mask.shape[2] == mask.shape[3] > 0:  # no earlier tokens in a cache
        mask = mask.amax((1, 2))
        mask = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    return mask.flatten() != 0 if mask.dim() == 2 else None


def watch_attention(model: nn.Module) -> None:
    """Shows every Attended in the model the mask of the attention of its experts' layer.

    Where a layer has none (experts in blocks of their own) or several, padding stays unknown.
    """
    modules = dict(model.named_modules())
    for name, experts in modules.items():
        attended = getattr(experts, _NAME, None)
        attention = None if attended is None else _attention_beside(name, modules)
        if attended is not None and attention is not None:
            attention.register_forward_pre_hook(attended.see, with_kwargs=True)


def _attention_beside(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Returns the one child that takes a mask, of the nearest module around the experts that has such children."""
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
    """Makes Transformers watch the attention of every model whose experts it spreads from now on."""
    spread = getattr(mixin, "apply_expert_parallelism", None)
    if spread is None:  # a release that has it elsewhere: padding is sent as any token
        return

    @wraps(spread)
    def spread_and_watch(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        spread_model = spread(model, *args, **kwargs)
        watch_attention(spread_model)
        return spread_model

    mixin.apply_expert_parallelism = spread_and_watch
