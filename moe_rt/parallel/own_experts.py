"""Experts of a user's own, behind a Buffer: known to all that looks at parameters, as those of a MoELayer are."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from moe_rt.comm.buffer import Buffer
from moe_rt.errors import InvalidConfig
from moe_rt.nn.averaging import mean_of
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.spread import SpreadModule


def own_experts(module: nn.Module, buffer: Buffer) -> nn.Module:
    """Says that every rank of `buffer` holds other experts in `module`. Local.

    Call it before `prepare`, wrappers and optimizers. The parameters of the module and its children then are what those
    of MoELayer.experts are: not averaged, counted for clipping, refused by what takes them for copies; and `prepare`
    makes their gradients the mean.

    Args:
        module: holds the experts that the buffer's placement gives to this rank; changed in place. Where each parameter
            is [L, ...], one entry for each expert, `whole_state_dict` gathers them.

    Returns:
        module.

    Raises:
        InvalidConfig: it is a SpreadModule or has MoELayers, which say so themselves; or ranks are threads, which
            torch.distributed does not know.
    """
    known = next((m for m in module.modules() if isinstance(m, (SpreadModule, MoELayer))), None)
    if known is not None:
        raise InvalidConfig(f"own_experts: got {type(known).__name__} in the module, expected experts of your own")
    if buffer.num_ranks > 1 and buffer.process_group is None:
        got = f"{buffer.num_ranks} ranks that are threads"
        raise InvalidConfig(f"own_experts: got a buffer of {got}, expected one over a ProcessGroup or DeviceMesh")
    kind: Any = type(module)
    module.__class__ = _spread(kind)
    experts: Any = module
    experts._begin()
    ids = buffer.spec.placement.local_experts(buffer.rank)
    experts.spread_over(buffer.num_ranks, buffer.process_group, ids, buffer.spec.num_experts)
    module.register_forward_pre_hook(_mark)
    return module


class _OwnExperts(SpreadModule):
    """Takes the mean in hooks of parameters, since `forward` is not ours."""

    def mark_parameters(self, root: nn.Module | None = None) -> None:
        super().mark_parameters(root)
        for p in (root or self).parameters():
            if p.requires_grad and self.num_ranks > 1 and not hasattr(p, "takes_mean"):
                p.takes_mean = p.register_hook(self._take_mean)  # type: ignore[attr-defined]

    def _take_mean(self, grad: Tensor) -> Tensor | None:
        return None if self.mean is None else mean_of(grad, self.mean)


@cache
def _spread(kind: Any) -> Any:
    """The class of a module, as a SpreadModule. FSDP2 changes classes in the same way."""
    return type(kind.__name__, (_OwnExperts, kind), {"__module__": kind.__module__})


def _mark(module: nn.Module, args: Any) -> None:
    if not is_compiling():
        module.mark_parameters()  # type: ignore[operator]
