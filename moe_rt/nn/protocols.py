"""Interfaces that a user's own router, experts and shared expert must have in a layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_rt.errors import expect
from moe_rt.nn.router_losses import RouterAux
from moe_rt.nn.spread import SpreadModule


class RouterLike(Protocol):
    """A torch module that chooses experts; `moe_rt.nn.router.Router` is one.

    Its parameters are identical on every rank.

    Attributes:
        num_experts, num_topk: E and K, equal to the layer's config.
    """

    @property
    def num_experts(self) -> int: ...

    @property
    def num_topk(self) -> int: ...

    def __call__(self, x: Tensor, topk_idx: Tensor | None = None, /) -> tuple[Tensor, Tensor, RouterAux]:
        """Choose experts. An InvalidInput that it raises is raised on every rank.

        If the layer's caller marks padding, x is zero there. A router whose `forward` has a parameter `mask`, or takes
        arbitrary keywords, gets `mask=`, bool of x's leading shape, True for a real token, and must exclude padding
        itself. Any other router routes padding like any token. The layer then sets the ids of padding to -1 and
        corrects tokens_per_expert and topk_idx of a RouterAux, but not its losses.

        Args:
            x: [..., H], the layer's input.
            topk_idx: [T, K], experts that the layer's caller wants visited, or None.

        Returns:
            topk_idx int64 [T, K], -1 for none; topk_weights floating [T, K]; and the layer's second result, of which
            the layer reads tokens_per_expert, int64 [E].
        """
        ...


class ExpertsLike(Protocol):
    """A `moe_rt.nn.spread.SpreadModule` that runs this rank's experts; `moe_rt.nn.experts.Experts` is one.

    All its parameters belong to the module itself, not to children, and are [L, ...]: slices of global tensors in the
    order of the layer's `expert_ids`. `forward` takes them from `SpreadModule.parts`, so that gradient averaging,
    clipping, FSDP2 and checkpoints work as with `moe_rt.nn.experts.Experts`.
    """

    def __call__(self, x: Tensor, offs: Tensor, /) -> Tensor:
        """Run the experts on x [rows, H], packed by expert -> [rows, H] in x's dtype.

        offs int32 [L] has the inclusive ends of the experts' rows. Rows past offs[-1] are unspecified and must not
        affect the gradient of a parameter.
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
    """Check that the user's own modules, if not None, fit a layer with these sizes.

    Raises:
        InvalidConfig: a module does not fit; names the field, what was got and what was expected.
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
            expect(name in own, f"experts.{name}", "a parameter of a child", "only parameters of the module itself")
            fits = p.dim() > 0 and p.shape[0] == num_local
            expect(fits, f"experts.{name}", list(p.shape), f"[{num_local}, ...] for the experts of this rank")
