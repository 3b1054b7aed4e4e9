"""Inputs of ops: values are what torch says they are, and a tensor without values is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from conftest import CPU_HEAPS, HEAPS
from ops import cases_tensors as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 2
ARGUMENTS = ("x", "topk_idx", "topk_weights", "y", "recv_weights")
# Kinds that torch does not have for vectors or integers.
NONE = (("csr", "recv_weights"), ("jagged", "recv_weights"), ("mkldnn", "topk_idx"))


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("kind", ["owes sign", "imaginary part", "no memory"])
def test_signs_that_are_owed_and_zeros_without_memory(make_ranks: MakeRanks, heap: str, kind: str) -> None:
    """Negated views and tensors without memory, as inputs and gradients, give the same bits as plain tensors."""
    make_ranks(heap, SIZE).run(cases.kinds_agree, kind)


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize(("name", "argument"), [(n, a) for n in cases.ODD for a in ARGUMENTS if (n, a) not in NONE])
def test_an_argument_of_another_kind(make_ranks: MakeRanks, heap: str, argument: str, name: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.odd_argument, FAULTY_RANK, name, argument)
    assert all(text.startswith("InvalidInput: ") for text in texts), texts
    assert f"{argument}: got a" in texts[FAULTY_RANK].replace("got NoneType", "got a NoneType"), texts
    assert "rank 1 refused its input" in texts[0]


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_numpy_array_is_named(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.odd_argument, FAULTY_RANK, "numpy", "x")
    assert texts[FAULTY_RANK].startswith("InvalidInput: x: got a numpy.ndarray, expected a torch.Tensor")


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_sparse_gradient(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.odd_gradient, FAULTY_RANK)
    assert "grad_recv_x: got a tensor of layout torch.sparse_coo" in texts[FAULTY_RANK], texts
    assert "rank 1 refused its input" in texts[0]


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("tag", [2**28, 2**28 + 1, 2**32, 2**70, -1, 1.0, "router", None], ids=str)
def test_what_is_no_tag(make_ranks: MakeRanks, heap: str, tag: Any) -> None:
    """An invalid tag is refused on every rank: 2**28 + 1 must not be taken for the layer of 1."""
    ranks = make_ranks(heap, SIZE).run(cases.odd_tag, FAULTY_RANK, tag)
    for texts in zip(*ranks, strict=True):
        assert texts[FAULTY_RANK].startswith(f"InvalidInput: tag: got {tag!r}, expected an integer in [0, 2**28)")
        assert "rank 1 refused its input" in texts[0]


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("handle", [None, "handle", 3, ()], ids=str)
@pytest.mark.parametrize("with_out", [False, True], ids=["out", "into"])
def test_a_handle_of_another_kind(make_ranks: MakeRanks, heap: str, handle: Any, with_out: bool) -> None:
    texts = make_ranks(heap, SIZE).run(cases.odd_handle, FAULTY_RANK, handle, with_out)
    assert texts[FAULTY_RANK].startswith(f"InvalidInput: handle: got a {type(handle).__name__}, expected the Handle")
    assert texts[0].startswith("InvalidInput: ")
    assert "rank 1 refused its input" in texts[0]


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("coded", ["yes", 1, None, numpy.ones(2)], ids=str)
def test_what_is_no_choice(make_ranks: MakeRanks, heap: str, coded: Any) -> None:
    texts = make_ranks(heap, SIZE).run(cases.odd_choice, FAULTY_RANK, coded)
    assert texts[FAULTY_RANK].startswith("InvalidInput: coded: got ")
    assert "rank 1 refused its input" in texts[0]
