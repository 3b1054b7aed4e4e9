"""Dispatch's backward overlaps with the gradients of the experts' weights: same bits, and each hook fires once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layer import cases_overlap as cases
from support.ranks import Ranks

from moe_rt.ops.late_weights import LateWeights

MakeRanks = Callable[[str, int], Ranks]
BITWISE = {"rtol": 0, "atol": 0}
KINDS = ["plain", "shared", "biases", "split", "transposed", "frozen router", "one frozen weight", "no input gradient"]
KINDS += ["no tokens", "autocast", "checkpoint", "reentrant", "checkpoint of experts"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_equal_and_weights_come_between(make_ranks: MakeRanks, kind: str) -> None:
    for (grads, seen, y), (expected, plain, same) in make_ranks("shm", 2).run(cases.both, kind):
        torch.testing.assert_close((grads, y), (expected, same), **BITWISE)
        begin, wait = seen.index("_run_first"), seen.index("_run_second")
        between = seen[begin + 1 : wait]
        assert between, seen
        late = ("experts.", "shared_expert.")
        assert all(name.startswith(late) for name in between)
        assert {name for name in seen if name.startswith(late) and "bias" not in name} <= set(between)
        assert sorted(set(seen)) == sorted(seen), "every hook fires once, and one op is begun"
        assert sorted(plain) == sorted(set(seen) - {"_run_first", "_run_second"})


@pytest.mark.parametrize("kind", ["frozen experts", "hook on the experts", "hook before experts in an adapter"])
def test_nothing_to_overlap_with(make_ranks: MakeRanks, kind: str) -> None:
    for (grads, seen, y), (expected, _, same) in make_ranks("shm", 2).run(cases.both, kind):
        torch.testing.assert_close((grads, y), (expected, same), **BITWISE)
        assert "_run_first" not in seen


def test_low_rank_adapter(make_ranks: MakeRanks) -> None:
    """Its gradients do not move: they are not the experts' products."""
    for (grads, seen, y), (expected, plain, same) in make_ranks("shm", 2).run(cases.both, "lora"):
        torch.testing.assert_close((grads, y), (expected, same), **BITWISE)
        assert sorted(plain) == sorted(set(seen) - {"_run_first", "_run_second"})


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_data_parallel(make_ranks: MakeRanks, wrap: str) -> None:
    for grads, expected in make_ranks("shm", 2).run(cases.wrapped, wrap):
        torch.testing.assert_close(grads, expected, **BITWISE)


@pytest.mark.parametrize(("num_chunks", "in_halves"), [(1, True), (3, False)])
def test_tensors_are_gone_after_backward(make_ranks: MakeRanks, num_chunks: int, in_halves: bool) -> None:
    """A backward keeps as few tensors as that of whole ops, and no circle of objects keeps any."""
    run = make_ranks("shm", 2).run
    of_whole_ops = run(cases.kept_tensors, 1, False)
    for expected, counts in zip(of_whole_ops, run(cases.kept_tensors, num_chunks, in_halves), strict=True):
        after, gone = counts[:2]
        assert counts == [after, gone] * 3
        assert after - gone == expected[0] - expected[1]


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_token_window_is_not_for_training(make_ranks: MakeRanks, num_chunks: int) -> None:
    """Later ops overwrite its rows, which autograd may have saved."""
    for text in make_ranks("shm", 2).run(cases.window_with_gradients, num_chunks):
        assert "x: got a token window in a dispatch that gradients are recorded of" in text, text


def test_weights_are_made_once_for_each_module_and_dtype() -> None:
    late, made = LateWeights(None), [{"w": torch.ones(1) * i} for i in range(3)]
    keys = [("one", torch.float32), ("one", torch.bfloat16), ("other", torch.float32)]
    for key, weights in zip(keys, made, strict=True):
        assert late.made_once(key, lambda weights=weights: weights) is weights
    assert [late.made_once(key, dict) for key in keys] == made


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_has_the_layout_of_its_weight(transposed: bool) -> None:
    """Autograd would copy any other."""
    weight = torch.randn(2, 16, 8).requires_grad_()
    b, offs = weight if transposed else weight.transpose(1, 2), torch.tensor([3, 5], dtype=torch.int32)
    late, a = LateWeights(None), torch.randn(5, b.shape[1])
    products = [late.multiply(weight, a * i, b, offs, False) for i in (1, 2)]
    (grad,) = torch.autograd.grad(products, weight, [torch.ones_like(y) for y in products])
    expected = torch.stack([rows.sum(0)[:, None].expand(-1, b.shape[2]) * 3 for rows in a.split([3, 2])])
    torch.testing.assert_close(grad, expected if transposed else expected.transpose(1, 2))
    assert grad.stride() == weight.stride()


def test_gradient_of_one_weight_alone(make_ranks: MakeRanks) -> None:
    """The means of all weights are one node of the graph, and the others have no gradient then."""
    for alone, whole in make_ranks("shm", 2).run(cases.one_weight):
        torch.testing.assert_close(alone, whole, **BITWISE)


def test_exception_between_the_halves(make_ranks: MakeRanks) -> None:
    """Rank 0's hook raises; its next op is refused, on every rank, by an error that names the op under way."""
    errors = make_ranks("shm", 2).run(cases.raises_between)
    assert "ValueError" in errors[0][0]
    assert "while dispatch_backward of layer tag" in errors[0][1]
    assert "InvalidInput" in errors[1][0]
