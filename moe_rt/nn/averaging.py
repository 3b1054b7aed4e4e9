"""Averages the gradients of experts over ranks in every backward, as data parallelism does for other parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch.compiler import is_compiling

from moe_rt.nn.part import Part


class Mean(NamedTuple):
    """A mean of gradients over `num_ranks` ranks; the ranks of the process group named `replicas` hold copies."""

    num_ranks: int
    replicas: str | None


class Averaged(torch.autograd.Function):
    """Identity on a weight; its backward replaces the gradient by the mean."""

    @staticmethod
    def forward(weight: Tensor, num_ranks: int, replicas: str | None) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.num_ranks, ctx.replicas = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Each backward takes its own mean, so sums over micro-batches are right with and without no_sync.
        return mean_of(grad, Mean(ctx.num_ranks, ctx.replicas)), None, None


class _Plain(Averaged):
    """Averaged for a Part. It also has tangents, which torch.compile does not trace."""

    @staticmethod
    def forward(weight: Tensor, num_ranks: int, replicas: str | None) -> Tensor:
        with _DisableTorchDispatch():
            return weight.view_as(weight)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)


def averaged(weight: Tensor, mean: Mean | None) -> Tensor:
    """Return a plain tensor in the memory of `weight`, whose gradient becomes the mean."""
    if is_compiling():  # a Part is a plain tensor there
        return weight if mean is None else Averaged.apply(weight, *mean)
    if mean is None and not isinstance(weight, Part):
        return weight
    return _Plain.apply(weight, *(mean or Mean(1, None)))


def mean_of(grad: Tensor, mean: Mean) -> Tensor:
    """Return the gradient divided by the number of ranks and summed over the copies. Collective over the copies."""
    if mean.num_ranks > 1:
        grad = grad / mean.num_ranks
    if mean.replicas is not None:
        collectives = torch.ops._c10d_functional
        grad = collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", mean.replicas))
    return grad
