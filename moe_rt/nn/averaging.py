"""Averages the gradients of experts over ranks in every backward, as data parallelism does for other parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch.compiler import is_compiling

from moe_rt.buffer.replicas import leaves
from moe_rt.errors import InvalidConfig
from moe_rt.nn.part import Part


class Mean(NamedTuple):
    """A mean of gradients over `num_ranks` ranks; the ranks of the process group named `replicas` hold copies."""

    num_ranks: int
    replicas: str | None


class Averaged(torch.autograd.Function):
    """Identity on weights; its backward replaces their gradients by means.

    One node takes all means, which are collective over copies: the order in which autograd runs several nodes depends
    on how a rank runs its ops.
    """

    @staticmethod
    def forward(num_ranks: int, replicas: str | None, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.num_ranks, ctx.replicas = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Each backward takes its own means, so sums over micro-batches are right with and without no_sync.
        mean = Mean(ctx.num_ranks, ctx.replicas)
        return None, None, *(mean_of(grad, mean) for grad in grads)


class _Plain(Averaged):
    """Averaged for Parts. It also has tangents, which torch.compile does not trace."""

    @staticmethod
    def forward(num_ranks: int, replicas: str | None, *weights: Tensor) -> tuple[Tensor, ...]:
        with _DisableTorchDispatch():
            return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


def averaged(weights: dict[str, Tensor], mean: Mean | None) -> dict[str, Tensor]:
    """Return plain tensors in the memory of the weights, whose gradients become means."""
    compiling = is_compiling()  # a Part is a plain tensor there
    if mean is None and (compiling or not any(isinstance(weight, Part) for weight in weights.values())):
        return weights
    made: dict[str, Tensor] = {}
    for trained in (True, False):  # torch would take gradients of all weights of a node
        names = [name for name, weight in weights.items() if weight.requires_grad is trained]
        given = *(mean or Mean(1, None)), *(weights[name] for name in names)
        made.update(zip(names, (Averaged if compiling else _Plain).apply(*given) if names else (), strict=True))
    return {name: made[name] for name in weights}


def mean_of(grad: Tensor, mean: Mean) -> Tensor:
    """Return the gradient divided by the number of ranks and summed over the copies. Collective over the copies."""
    if mean.num_ranks > 1:
        grad = grad / mean.num_ranks
    if mean.replicas is not None:
        collectives = torch.ops._c10d_functional
        grad = collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", mean.replicas))
    return grad


def refuse_copied_adapter(y: Tensor, mean: Mean) -> None:
    """Raise InvalidConfig if experts have copies, and their rows `y` depend on weights whose gradients are no means.

    Only eager ranks check.
    """
    if mean.replicas is None or is_compiling():
        return
    for p in leaves(y.grad_fn, "_PlainBackward"):
        raise InvalidConfig(
            f"experts: got a weight {list(p.shape)} of an adapter, and copies of these experts on other ranks, which "
            "would differ; expected a SpreadModule whose forward takes it from `self.parts`"
        )


class _Scaled(torch.autograd.Function):
    """Identity, whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _PlainScaled(_Scaled):
    """_Scaled with tangents, as in _Plain."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient is multiplied by a factor."""
    scaled: Tensor = (_Scaled if is_compiling() else _PlainScaled).apply(x, factor)
    return scaled
