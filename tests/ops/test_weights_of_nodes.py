"""LateWeights: gradients are those of plain products, for any number of products, of backwards and of leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rt.lab.testing.rounds import check_bits
from moe_rt.nn import overlap
from moe_rt.ops.late_weights import LateWeights

IN, OUT, L = 8, 6, 3
OFFS = torch.tensor([4, 4, 9], dtype=torch.int32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nodes_of(y: Tensor) -> list[str]:
    return [
        type(y.grad_fn).__name__,
        *(type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None),
    ]  # type: ignore[union-attr]


def graph(late: bool, num_products: int, contiguous: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return products with one weight of rows of their own, and rows and weight."""
    weight = drawn(L, IN, OUT, seed=9).requires_grad_() if contiguous else drawn(L, OUT, IN, seed=9).requires_grad_()
    rows = [drawn(9, IN, seed=i).requires_grad_() for i in range(num_products)]
    weights = LateWeights(late=late)
    b = weight if contiguous else weight.mT
    return [weights.multiply(weight, a, b, OFFS, False) for a in rows], [*rows, weight]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("num_products", [1, 2, 3])
def test_gradients_are_those_of_plain_products(num_products: int, contiguous: bool) -> None:
    """Whole backwards have them, again and again, also after some that needed no weight, no rows or not all."""
    late, leaves = graph(True, num_products, contiguous)
    plain, same = graph(False, num_products, contiguous)
    torch.testing.assert_close(late, plain, rtol=0, atol=0)
    grads = [drawn(9, OUT, seed=50 + i) for i in range(num_products)]

    def compare(products: slice, wanted: list[int]) -> None:
        def asked(outputs: list[Tensor], inputs: list[Tensor]) -> Any:
            return torch.autograd.grad(
                outputs[products], [inputs[i] for i in wanted], grads[products], retain_graph=True, allow_unused=True
            )

        torch.testing.assert_close(asked(late, leaves), asked(plain, same))

    everything = list(range(num_products + 1))
    compare(slice(None), everything)
    compare(slice(None), [0])
    compare(slice(None), everything)
    compare(slice(None), [num_products])
    compare(slice(None), everything)
    assert leaves[-1].grad is None


def test_a_backward_that_raised_leaves_nothing_to_the_next() -> None:
    (one, two), leaves = graph(True, 2, True)
    (same_one, same_two), same = graph(False, 2, True)
    hook = one.register_hook(lambda _: (_ for _ in ()).throw(ValueError("a mistake on purpose")))
    with pytest.raises(ValueError, match="on purpose"):
        (one.sum() + two.sum()).backward(retain_graph=True)
    hook.remove()
    for leaf in leaves:
        leaf.grad = None
    (one.sum() + two.sum()).backward()
    (same_one.sum() + same_two.sum()).backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], [leaf.grad for leaf in same])


def test_weights_have_sums_of_their_own() -> None:
    weights = [drawn(L, IN, OUT, seed=i).requires_grad_() for i in range(2)]
    late, a = LateWeights(), drawn(9, IN)
    products = [late.multiply(w, a, w, OFFS, False) * factor for w in weights for factor in (1.0, 10.0)]
    sum(products).sum().backward()  # type: ignore[union-attr]
    plain = [w.detach().requires_grad_() for w in weights]
    sum(LateWeights(late=False).multiply(w, a, w, OFFS, False) * 11.0 for w in plain).sum().backward()  # type: ignore[union-attr]
    torch.testing.assert_close([w.grad for w in weights], [w.grad for w in plain])


@pytest.mark.parametrize(
    ("late", "trains", "records", "expected"),
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
)
def test_who_gets_nodes(late: bool, trains: bool, records: bool, expected: bool) -> None:
    """Only a weight that is trained, in a forward that autograd records."""
    weight, a = drawn(L, IN, OUT).requires_grad_(trains), drawn(9, IN).requires_grad_()
    with torch.set_grad_enabled(records):
        y = LateWeights(late=late).multiply(weight, a, weight, OFFS, False)
    names = [] if y.grad_fn is None else nodes_of(y)
    assert any("_Later" in name for name in names) == any("_Product" in name for name in names) == expected
    assert y.requires_grad == records


@pytest.mark.parametrize("row_wise", [False, True])
def test_products_are_of_the_kind_that_is_asked_for(row_wise: bool) -> None:
    weight, a = drawn(L, IN, 5).requires_grad_(), drawn(9, IN).requires_grad_()
    for late in (False, True):
        y = LateWeights(late=late).multiply(weight, a, weight, OFFS, row_wise)
        expected = torch.ops.moe_rt.grouped_mm(a, weight, OFFS, row_wise)
        check_bits("y", y, expected)
        grad = drawn(9, 5, seed=3)
        got, want = (torch.autograd.grad(t, [a, weight], grad, retain_graph=True) for t in (y, expected))
        check_bits("rows", got[0], want[0])
        check_bits("weight", got[1], want[1])


def test_weights_have_their_place_among_nodes() -> None:
    """Autograd runs the newest ready node: theirs are as old as their place."""
    weight, x = drawn(L, IN, OUT).requires_grad_(), drawn(9, IN).requires_grad_()
    place = overlap.free_place(x)
    assert place is not None
    assert overlap.free_place(x.detach()) is None
    a = x * 2
    for given, expected in ((place, True), (None, False)):
        y = LateWeights(given).multiply(weight, a, weight, OFFS, False)
        (of_rows, _), (of_weight, _) = y.grad_fn.next_functions[:2]  # type: ignore[union-attr]
        assert "_Later" in type(of_weight).__name__
        assert (of_weight._sequence_nr() == place) == expected
        assert (of_weight._sequence_nr() < of_rows._sequence_nr()) == expected


def test_frozen_rows_have_no_gradient() -> None:
    weight, frozen = drawn(L, IN, OUT).requires_grad_(), drawn(9, IN)
    late = LateWeights()
    y = late.multiply(weight, frozen, weight, OFFS, False)
    y.sum().backward()
    assert frozen.grad is None
    expected = torch.stack([rows.sum(0)[:, None].expand(IN, OUT) for rows in frozen.split([4, 0, 5])])
    torch.testing.assert_close(weight.grad, expected)
