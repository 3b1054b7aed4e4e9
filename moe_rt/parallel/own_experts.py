"""Marks a user's own experts, run on a Buffer, so that their parameters are treated like those of a MoELayer."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from moe_rt.buffer.buffer import Buffer
from moe_rt.errors import InvalidConfig
from moe_rt.nn.averaging import mean_of
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.spread import SpreadModule


def own_experts(module: nn.Module, buffer: Buffer) -> nn.Module:
    """Declare that the experts in `module` differ between the ranks of `buffer`. Local.

    Call it before `prepare`, wrappers and optimizers. The parameters of the module and its children are then treated
    like those of MoELayer.experts: they are not averaged as replicas, they count for clipping, operations that require
    replicas refuse them, and `prepare` turns their gradients into means.

    Args:
        module: the experts that the buffer's placement gives to this rank; changed in place. If each parameter is
            [L, ...], one entry for each expert, `whole_state_dict` can gather them.
        buffer: the buffer that the experts are run on.

    Returns:
        `module`.

    Raises:
        InvalidConfig: the module is or has a SpreadModule or MoELayer, which is already marked; or ranks are threads,
            which torch.distributed does not support.
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
    """Averages gradients in hooks on the parameters, because `forward` is the user's."""

    def mark_parameters(self, root: nn.Module | None = None) -> None:
        super().mark_parameters(root)
        for p in (root or self).parameters():
            if p.requires_grad and self.num_ranks > 1 and not hasattr(p, "takes_mean"):
                p.takes_mean = p.register_hook(self._take_mean)  # type: ignore[attr-defined]

    def _take_mean(self, grad: Tensor) -> Tensor | None:
        return None if self.mean is None else mean_of(grad, self.mean)


@cache
def _spread(kind: Any) -> Any:
    """Return a subclass of `kind` that is a SpreadModule. FSDP2 changes classes in the same way."""
    return type(kind.__name__, (_OwnExperts, kind), {"__module__": kind.__module__})


def _mark(module: nn.Module, args: Any) -> None:
    if not is_compiling():
        module.mark_parameters()  # type: ignore[operator]
