"""Marks a user's own experts, run on a Buffer, so that their parameters are treated like those of a MoELayer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils.stateless import _reparametrize_module

from moe_rt.buffer.buffer import Buffer
from moe_rt.errors import InvalidConfig
from moe_rt.nn.averaging import averaged, mean_of
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.spread import SpreadModule


def own_experts(module: nn.Module, buffer: Buffer) -> nn.Module:
    """Declare that the experts in `module` differ between the ranks of `buffer`. Local.

    Call it before `prepare`, wrappers and optimizers. The parameters of the module and its children are then treated
    like those of MoELayer.experts: they are not averaged as replicas, they count for clipping, operations that require
    replicas refuse them, and `prepare` turns their gradients into means.

    If several groups hold copies of the experts, only the module's forward may use its parameters, on one thread at a
    time. It finds plain tensors in their place. `prepare` refuses modules without a forward, such as ModuleList, and
    backward raises InvalidConfig if a parameter was used elsewhere.

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
    """Takes means over copies of the experts in one node, as `parts` does, since ranks must take them in one order.

    Without copies a mean is local. Hooks on the parameters then take it, wherever they are used.
    """

    _task: int | None = None  # the backward that runs the node, by torch's number
    _was_traced = False  # torch.compile has traced the node, which then sets no number

    def forward(self, *given: Any, **named: Any) -> Any:
        """Run the user's forward."""
        run = super().forward
        if self.mean is None or self.mean.replicas is None:
            return run(*given, **named)
        weights = averaged(dict(self.named_parameters(remove_duplicate=False)), self.mean)
        if is_compiling():
            self._was_traced = True
        else:
            for node in {w.grad_fn for w in weights.values() if w.grad_fn is not None}:
                node.register_prehook(self._note_backward)
        with _reparametrize_module(self, weights):
            return run(*given, **named)

    def check_copies(self) -> None:
        if super().forward.__func__ is nn.Module.forward:  # type: ignore[attr-defined]
            raise InvalidConfig(
                f"own_experts: got a {type(self).__name__}, which has no forward, and copies of these experts on other "
                "ranks; expected a module whose forward runs the experts"
            )

    def mark_parameters(self, root: nn.Module | None = None) -> None:
        super().mark_parameters(root)
        for p in (root or self).parameters():
            if p.requires_grad and self.num_ranks > 1 and not hasattr(p, "takes_mean"):
                p.takes_mean = p.register_hook(self._take_mean)  # type: ignore[attr-defined]

    def _note_backward(self, _: Any) -> None:
        self._task = torch._C._current_graph_task_id()

    def _take_mean(self, grad: Tensor) -> Tensor | None:
        if self.mean is None:
            return None
        if self.mean.replicas is None:
            return mean_of(grad, self.mean)
        if not self._was_traced and self._task != torch._C._current_graph_task_id():
            raise InvalidConfig(
                f"own_experts: got a gradient {list(grad.shape)} of a weight that was used outside of the module's "
                "forward; expected all uses there, since other ranks hold copies of these experts"
            )
        return None


@cache
def _spread(kind: Any) -> Any:
    """Return a subclass of `kind` that is a SpreadModule. FSDP2 changes classes in the same way."""
    return type(kind.__name__, (_OwnExperts, kind), {"__module__": kind.__module__})


def _mark(module: nn.Module, args: Any) -> None:
    if not is_compiling():
        module.mark_parameters()  # type: ignore[operator]
