"""What a layer's router, experts and shared expert must be where they are the user's own."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_rt.config.expect import expect
from moe_rt.nn.router_losses import RouterAux
from moe_rt.nn.spread import SpreadModule


class RouterLike(Protocol):
    """A torch module that chooses experts; `moe_rt.nn.router.Router` is one.

    Its parameters are the same on every rank.

    Attributes:
        num_experts, num_topk: E and K, those of the layer's config.
    """

    @property
    def num_experts(self) -> int: ...

    @property
    def num_topk(self) -> int: ...

    def __call__(self, x: Tensor, topk_idx: Tensor | None = None, /) -> tuple[Tensor, Tensor, RouterAux]:
        """x [..., H], as the layer got it -> topk_idx int64 [T, K], -1 for none; topk_weights floating [T, K]; and what
        the layer returns as aux, of which it reads tokens_per_expert, int64 [E].

        `topk_idx` [T, K] is what the layer's caller wants visited, if anything. InvalidInput becomes every rank's.

        Where the layer's caller names padding, x is zero there, and a router whose `forward` has a parameter `mask`, or
        takes any, is given `mask=`, bool of x's leading shape, True for a real token: its losses and counts are then
        its own affair. One that has none routes padding like any token; the layer sets its ids to -1 and, in a
        RouterAux, tokens_per_expert and topk_idx to what is left, but losses stay as they are.
        """
        ...


class ExpertsLike(Protocol):
    """A `moe_rt.nn.spread.SpreadModule` that runs this rank's experts; `moe_rt.nn.experts.Experts` is one.

    All its parameters are its own, none a child's, and [L, ...]: slices of global tensors in the order of the layer's
    `expert_ids`. `forward` takes them from `SpreadModule.parts`, so that averaging gradients, clipping, FSDP2 and
    checkpoints work as with the layer's own.
    """

    def __call__(self, x: Tensor, offs: Tensor, /) -> Tensor:
        """x [rows, H] packed by expert, offs int32 [L], the inclusive ends of experts' rows -> [rows, H] in x's dtype.

        Rows past offs[-1] are unspecified; what is made of them must reach no gradient of a parameter.
        """
        ...


def check_siblings(
    router: Any,
    experts: Any,
    shared_expert: Any,
    *,
    num_experts: int,
    num_topk: int,
    num_local: int,
    device: torch.device,
) -> None:
    """Whether modules of the user's own, those that are not None, fit a layer with these sizes.

    Raises:
        InvalidConfig: naming what does not, what was got and what was expected.
    """
    modules = {"router": router, "experts": experts, "shared_expert": shared_expert}
    given = {kind: module for kind, module in modules.items() if module is not None}
    for kind, module in given.items():
        expected = SpreadModule if kind == "experts" else nn.Module
        where = f"a {expected.__module__}.{expected.__qualname__}"
        expect(isinstance(module, expected), kind, type(module).__name__, where)
        for name, p in module.named_parameters():
            expect(p.device == device, f"{kind}.{name}", f"a parameter on {p.device}", f"one on {device}")
    if router is not None:
        for name, size in (("num_experts", num_experts), ("num_topk", num_topk)):
            got = getattr(router, name, None)
            expect(got == size, f"router.{name}", got, f"{size} as in the config")
    if experts is not None:
        own = dict(experts.named_parameters(recurse=False))
        expect(bool(own), "experts", "no parameter of its own", "at least one")
        for name, p in experts.named_parameters():
            expect(name in own, f"experts.{name}", "a parameter of a child", "parameters of its own alone")
            fits = p.dim() > 0 and p.shape[0] == num_local
            expect(fits, f"experts.{name}", list(p.shape), f"[{num_local}, ...] for the experts of this rank")
