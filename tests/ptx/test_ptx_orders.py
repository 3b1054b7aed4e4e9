"""Every barrier, release and acquire of some kernels is needed: without it a case is reported, or a table gives a
reason."""

from __future__ import annotations

import pytest
from ptx import cases_ptx_orders as cases
from ptx.orders import Order
from ptx.own_process import isolated
from ptx.unneeded_orders import NOT_NEEDED

OPS = ("dispatch", "combine", "combine_backward")
LAUNCHES = (*(f"{op}_{half}" for op in OPS for half in ("send", "wait", "receive")), "abort_group", "leave")
WHICH = ("mapped", "network")  # test_ptx_ring.py covers the orders that only kernels with rings have
ENTRIES = [
    *((kernels, entry) for kernels in WHICH for entry in LAUNCHES),
    ("network", "dispatch_fetch"),
    # Entries of the kernels over nodes whose orders are all covered.
    *(("nodes", entry) for entry in ("dispatch_lists", "dispatch_forward", "combine_receive")),
]


@pytest.fixture(scope="module")
def reached() -> dict[str, dict[str, set[tuple[str, int]]]]:
    return {kernels: isolated(cases.reached, kernels) for kernels in WHICH}


def is_needed(kernels: str, order: Order) -> bool:
    return not any(row.speaks_of(kernels, order) for row in NOT_NEEDED)


def noticed(kernels: str, order: Order, reached: dict[str, set[tuple[str, int]]]) -> str:
    names = [name for name, sites in reached.items() if (order.entry, order.line) in sites]
    said = isolated(cases.noticed, kernels, order, names) if names else ""
    print(f"{order.entry}:{order.line} {order.text} | {order.place} | {said.partition(chr(10))[0] or names}")
    return str(said)


@pytest.mark.timeout(3600)
@pytest.mark.sweep
@pytest.mark.parametrize(("kernels", "entry"), ENTRIES)
def test_each_is_needed(kernels: str, entry: str, reached: dict[str, dict[str, set[tuple[str, int]]]]) -> None:
    wanted = [order for order in cases.orders(kernels, entry) if is_needed(kernels, order)]
    missed = [f"{o.line}: {o.text!r} of {o.place!r}" for o in wanted if not noticed(kernels, o, reached[kernels])]
    assert not missed, "\n".join([f"of {entry}, nothing notices that these are missing:", *missed])


@pytest.mark.sweep
def test_nothing_is_listed_that_is_not_there() -> None:
    found = [(kernels, order) for kernels, entry in ENTRIES for order in cases.orders(kernels, entry)]
    unused = [row for row in NOT_NEEDED if not any(row.speaks_of(kernels, order) for kernels, order in found)]
    assert not unused
