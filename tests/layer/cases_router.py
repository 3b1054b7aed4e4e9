"""Routers of every family, and tokens, for the router's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt.nn.router import Router

H, E, K, T = 24, 16, 4, 50

FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "unnormalised": {"norm_topk": False},
    "sigmoid": {"score_func": "sigmoid", "route_scale": 2.5},
    "deepseek": dict(score_func="sigmoid", route_scale=2.5, num_groups=4, topk_groups=2, balance_bias=True),
    "softmax groups": {"num_groups": 8, "topk_groups": 3},
    "gpt-oss": {"topk_before_softmax": True, "router_bias": True},
    "jittered": {"jitter": 0.1},
    "batch loss": {"balance_scope": "batch"},
    "expert choice": {"expert_choice": 2.0, "norm_topk": False},
}


def make_router(dtype: torch.dtype = torch.float32, **options: Any) -> Router:
    options = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, **options}
    router = Router(H, E, K, **options).to(dtype)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for t in (router.weight, router.bias, router.balance_bias):
            if t is not None:
                t.copy_(torch.randn(t.shape, generator=g, dtype=torch.float64) * 0.3)
    return router


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


class NoRead(TorchDispatchMode):
    """Raises on ops whose result or shape depends on values on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "item", "masked_select", "bincount", "unique"), name
        return func(*args, **(kwargs or {}))
