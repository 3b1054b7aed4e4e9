"""Sums by a tree: over ranks as over sequences, in the wider dtype, and modules over sequences equal torch's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.ranks import ThreadRanks
from torch import Tensor, nn
from torch.autograd import forward_ad

from moe_rt.lab.testing.rounds import check_bits
from moe_rt.nn import by_sequence
from moe_rt.ops import tree_sums
from moe_rt.ops.tree_sums import for_each_sequence, tree_all_reduce, tree_sum


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-3, 3, shape[-1])).to(
        dtype
    )


def by_halves(parts: list[Tensor]) -> Tensor:
    """Return the sum as the module's text says: halves separately, an odd number in order."""
    if len(parts) % 2:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    half = len(parts) // 2
    return by_halves(parts[:half]) + by_halves(parts[half:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_halves_are_summed_separately(dtype: torch.dtype) -> None:
    for number in range(1, 41):
        for shape in ((3,), (2, 3)):
            parts = drawn(number, *shape, dtype=dtype)
            check_bits(f"{number} parts", tree_sum(parts), by_halves(list(parts)))
    for shape in ((3,), (2, 3)):
        assert torch.equal(tree_sum(torch.ones(0, *shape, dtype=dtype)), torch.zeros(shape, dtype=dtype))


class Collectives:
    """torch.distributed of ranks that are threads, and what they moved."""

    def __init__(self, size: int) -> None:
        self.size, self.moved, self._barrier = size, [0] * size, threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def rank(self) -> int:
        return int(threading.current_thread().name.split()[-1])

    def get_world_size(self, group: Any) -> int:
        assert group == "the group"
        return self.size

    def _exchanged(self, given: Tensor, group: Any) -> list[Tensor]:
        assert group == "the group"
        self._given[self.rank()] = given.clone()
        self.moved[self.rank()] += given.numel()
        self._barrier.wait(60.0)
        found = list(self._given)
        self._barrier.wait(60.0)
        return found

    def all_to_all_single(self, received: Tensor, given: Tensor, group: Any) -> None:
        parts = [t.view(self.size, -1)[self.rank()] for t in self._exchanged(given, group)]
        received.copy_(torch.cat(parts))

    def all_gather(self, received: Tensor, given: Tensor, group: Any) -> None:
        received.copy_(torch.cat(self._exchanged(given, group)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("shape", [(0,), (1,), (4,), (5,), (12,), (3, 5), ()], ids=str)
def test_ranks_add_up_by_the_tree(monkeypatch: pytest.MonkeyPatch, size: int, shape: tuple[int, ...]) -> None:
    """Every rank gets the bits of one tree; it moves its tensor and its part of the sum, and a single rank nothing."""
    collectives: Any = Collectives(size)
    monkeypatch.setattr(tree_sums, "dist", collectives)
    monkeypatch.setattr(tree_sums, "_all_gather", collectives.all_gather)
    of_ranks = [drawn(*shape, 1, seed=rank).squeeze(-1) for rank in range(size)]
    expected = tree_sum(torch.stack(of_ranks))

    def case(_: Any) -> tuple[Tensor, int]:
        t = of_ranks[collectives.rank()].clone()
        version = t._version
        tree_all_reduce(t, "the group")  # type: ignore[arg-type]
        return t, t._version - version

    for t, writes in ThreadRanks(size).run(case):
        check_bits("sum", t, expected)
        assert bool(writes) == (size > 1)
    padded = -(-expected.numel() // size) * size
    assert collectives.moved == [0 if size == 1 else padded + padded // size] * size


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_copies_of_a_weight(own: torch.dtype, dtype: torch.dtype | None) -> None:
    """Copies take no memory, and have the dtype that is asked for; gradients are summed in the wider one."""
    weight = drawn(4, 3, dtype=own).requires_grad_()
    for number in (0, 1, 3, 4):
        copies = for_each_sequence(weight, number, dtype)
        assert (copies.shape, copies.dtype) == ((number, 4, 3), dtype or own)
        assert copies.stride(0) == 0 or number < 2
        assert torch.equal(copies, weight.detach().to(dtype or own).expand(number, 4, 3))
        grad = drawn(number, 4, 3, dtype=dtype or own, seed=1)
        (got,) = torch.autograd.grad(copies, weight, grad)
        check_bits("gradient", got, tree_sum(grad.to(torch.promote_types(dtype or own, own))).to(own))
        with forward_ad.dual_level():
            moved = drawn(4, 3, dtype=own, seed=2)
            dual = for_each_sequence(forward_ad.make_dual(weight.detach(), moved), number, dtype)
            tangent = forward_ad.unpack_dual(dual).tangent
            assert torch.equal(tangent, moved.to(dtype or own).expand(number, 4, 3))


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_over_sequences(shape: tuple[int, int], bias: bool) -> None:
    ours, theirs = by_sequence.Linear(8, 5, bias=bias), nn.Linear(8, 5, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    x = drawn(*shape, 8).requires_grad_()
    names = ["x", *dict(ours.named_parameters())]
    results = []
    for module, given in ((ours, ()), (theirs, ()), (ours, (for_each_sequence(ours.weight, shape[0]),))):
        y = module(x, *given)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], drawn(*y.shape, seed=4))])
    for name, got, expected, of_copies in zip(["y", *names], *results, strict=True):
        torch.testing.assert_close(got, expected, msg=name, rtol=1e-4, atol=1e-2)
        check_bits(name, of_copies, got)


def test_a_linear_layer_in_autocast() -> None:
    """It computes in autocast's dtype if that is on, else in x's."""
    module, x = by_sequence.Linear(8, 5), drawn(2, 3, 8)
    assert module(x).dtype is torch.float32
    assert module(x.double()).dtype is torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype is torch.bfloat16
    check_bits("y", y, module(x.bfloat16()))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_norm_over_sequences(eps: float) -> None:
    ours, theirs = by_sequence.RMSNorm(8, eps=eps), nn.RMSNorm(8, eps=eps)
    with torch.no_grad():
        ours.weight.copy_(torch.linspace(0.5, 2, 8))
    theirs.load_state_dict(ours.state_dict())
    x = drawn(3, 5, 8).requires_grad_()
    results = []
    for module in (ours, theirs):
        y = module(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, module.weight])])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)
    each = [torch.autograd.grad(ours(s).square().sum(), ours.weight)[0] for s in x.detach().split(1)]
    check_bits("weight", results[0][2], tree_sum(torch.stack(each)))


def test_an_embedding_over_sequences() -> None:
    ours, ids = by_sequence.Embedding(7, 4), torch.tensor([[1, 1, 6], [0, 1, 2]])
    expected = nn.functional.embedding(ids, ours.weight)
    for y in (ours(ids), ours(ids, for_each_sequence(ours.weight, 2))):
        assert torch.equal(y, expected)
        (got,) = torch.autograd.grad(y.square().sum(), ours.weight)
        (want,) = torch.autograd.grad(expected.square().sum(), ours.weight, retain_graph=True)
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="zip"):
        ours(ids, for_each_sequence(ours.weight, 3))
