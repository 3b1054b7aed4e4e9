"""Users can change handles: a plan that is not this buffer's is refused on every rank, and not followed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import CPU_HEAPS, HEAPS
from faults import cases_handles as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3
HEAD = ("mark", "num_tokens", "num_pulled", "num_copies", "capacity", "first_own", "num_own", "num_rows")
ENTRIES = ("token", "source and slot", "first", "copies", "row", "k", "sent")


def assert_refused(texts: list[str], heap: str) -> None:
    """Check that every rank raised. GPU refusals end the group, so any rank, also the faulty one, may see GroupPoisoned
    first."""
    ended = ("InvalidInput: ", "GroupPoisoned: ") if heap == "loopback" else ("InvalidInput: ",)
    for rank, text in enumerate(texts):
        assert text.startswith(ended), texts
        if rank == FAULTY_RANK and text.startswith("InvalidInput: "):
            assert "handle: got plans that no dispatch of this buffer" in text
        else:
            assert "rank 1" in text, texts
    assert any(text.startswith("InvalidInput: ") for text in texts), texts


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("op", cases.OPS)
def test_a_handle_of_another_buffer(make_ranks: MakeRanks, heap: str, op: str) -> None:
    assert_refused(make_ranks(heap, SIZE).run(cases.another_buffers, FAULTY_RANK, op, heap != "loopback"), heap)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_handle_of_a_buffer_of_other_sizes(make_ranks: MakeRanks, heap: str) -> None:
    assert_refused(make_ranks(heap, SIZE).run(cases.other_sizes, FAULTY_RANK), heap)


@pytest.mark.parametrize("value", [-7, 2**30 + 12345])
@pytest.mark.parametrize(
    ("heap", "name"),
    [(heap, name) for heap in CPU_HEAPS for name in (*HEAD, *ENTRIES)] + [("loopback", name) for name in HEAD],
)
def test_an_overwritten_number(make_ranks: MakeRanks, heap: str, name: str, value: int) -> None:
    """Overwritten numbers of the head are refused on every heap, those of entries where the host reads them."""
    ranks = make_ranks(heap, SIZE).run(cases.overwritten, FAULTY_RANK, name, value, heap != "loopback")
    for texts in zip(*ranks, strict=True):
        assert_refused(list(texts), heap)


BOUNDS = ("token", "source", "slot", "copies", "first", "row", "k", "sent slot", "sent k")


@pytest.mark.parametrize("name", [*BOUNDS, *HEAD[1:]])
def test_a_number_at_its_bound(make_ranks: MakeRanks, name: str) -> None:
    """The least number out of bounds is refused: bounds are exact."""
    assert_refused(make_ranks("threads", SIZE).run(cases.at_the_bound, FAULTY_RANK, name), "threads")


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_plans_without_memory(make_ranks: MakeRanks, heap: str) -> None:
    *followed, numpy = zip(*make_ranks(heap, SIZE).run(cases.odd_plans, FAULTY_RANK), strict=True)
    for texts in followed:
        assert_refused(list(texts), heap)
    assert "handle.recv_plan: got a numpy.ndarray, expected a torch.Tensor" in numpy[FAULTY_RANK]


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_cut_plan(make_ranks: MakeRanks, heap: str) -> None:
    assert_refused(make_ranks(heap, SIZE).run(cases.fewer_tokens, FAULTY_RANK), heap)


@pytest.mark.parametrize("heap", HEAPS)
def test_copies_of_a_plan_are_as_good(make_ranks: MakeRanks, heap: str) -> None:
    make_ranks(heap, SIZE).run(cases.moved_plans)
