"""Gradients of weights as nodes of their own, which run later than those of rows and once for several products.

Autograd would compute a weight's gradient together with that of the rows, before anything else can go on, and would add
up those of several products as whole tensors. Here each product adds its part to one sum, except the last one of a
backward, whose part is left to the weight's node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from moe_rt.ops.grouped import add_gradient_of_weight


class LateWeights:
    """The weights of one forward of a layer, each with one node for its gradient.

    Args:
        late: False for the usual nodes of products; weights are still made once.

    Attributes:
        place: autograd's sequence number of these nodes: of the nodes that are ready, the one with the highest number
            runs. None for the usual numbers.
    """

    def __init__(self, place: int | None = None, *, late: bool = True) -> None:
        self.place, self._late = place, late
        self._made: dict[Hashable, dict[str, Tensor]] = {}
        self._views: dict[int, tuple[Tensor, Tensor, _Gradient]] = {}

    def made_once(self, key: Hashable, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights that `make` returned when it was first given with this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def multiply(self, weight: Tensor, a: Tensor, b: Tensor, offs: Tensor, row_wise: bool) -> Tensor:
        """Return grouped_mm(a, b, offs, row_wise), where `b` [L, in, out] is a view of `weight`."""
        if not self._late or not b.requires_grad or not torch.is_grad_enabled():
            product: Tensor = torch.ops.moe_rt.grouped_mm(a, b, offs, row_wise)
            return product
        if id(weight) not in self._views:
            gradient = _Gradient()
            view = _Later.apply(b, gradient)
            if self.place is not None:
                view.grad_fn._set_sequence_nr(self.place)
            self._views[id(weight)] = weight, view, gradient
        _, view, gradient = self._views[id(weight)]
        gradient.num_products += 1
        result: Tensor = _Product.apply(a, view, offs, row_wise, gradient)
        return result


class _Gradient:
    """Gradient of one weight in a backward: the sum of what products have added, and operands of the last one.

    Attributes:
        num_products: products with this weight in the forward.
    """

    num_products = 0
    _backward: int | None = None
    _awaited: int
    _total: Tensor | None = None
    _last: tuple[Tensor, Tensor, Tensor, bool] | None = None

    def add(self, *given: Any) -> None:
        """Add the gradient with these operands."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # another one may have ended early
            self._backward, self._awaited, self._total, self._last = backward, self.num_products, None, None
        self._awaited -= 1
        if self._awaited:
            self._total = add_gradient_of_weight(self._total, *given)
        else:
            self._last = given

    def take(self) -> Tensor | None:
        """Return the gradient, and forget it."""
        total, last = self._total, self._last
        self._backward = self._total = self._last = None
        return total if last is None else add_gradient_of_weight(total, *last)


class _Later(torch.autograd.Function):
    """Identity on a weight, whose backward returns the gradient that its products have left."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return b.view_as(b)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.gradient.take(), None


class _Product(torch.autograd.Function):
    """grouped_mm, whose backward leaves the gradient of the weight to the weight's node."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor, row_wise: bool, gradient: _Gradient) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        ctx.row_wise, ctx.gradient = row_wise, gradient
        product: Tensor = torch.ops.moe_rt.grouped_mm(a, b, offs, row_wise)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        a, b, offs = ctx.saved_tensors
        grad, grad_a = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_a = torch.ops.moe_rt.grouped_mm(grad, b.mT, offs, ctx.row_wise)
        ctx.gradient.add(a, grad, offs, b.is_contiguous())
        return grad_a, None, None, None, None
