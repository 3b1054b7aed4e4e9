"""Every barrier, release and acquire of some kernels is needed: without it a case is reported, or a table says why."""

from __future__ import annotations

import pytest
from ptx import cases_ptx_orders as cases
from ptx.isolated import isolated
from ptx.orders import Order
from ptx.orders_not_needed import NOT_NEEDED

ENTRIES = ("combine_send", "combine_receive", "combine_backward_send", "abort_group", "leave")


@pytest.fixture(scope="module")
def reached() -> dict[str, set[tuple[str, int]]]:
    return dict(isolated(cases.reached))


def is_needed(order: Order) -> bool:
    return not any(order.place == row.place and order.text.startswith(row.text) for row in NOT_NEEDED)


def noticed(order: Order, reached: dict[str, set[tuple[str, int]]]) -> str:
    names = [name for name, sites in reached.items() if (order.entry, order.line) in sites]
    said = isolated(cases.noticed, order, names) if names else ""
    print(f"{order.entry}:{order.line} {order.text} | {order.place} | {said.partition(chr(10))[0] or names}")
    return str(said)


@pytest.mark.timeout(3600)
@pytest.mark.sweep
@pytest.mark.parametrize("entry", ENTRIES)
def test_each_is_needed(entry: str, reached: dict[str, set[tuple[str, int]]]) -> None:
    wanted = [order for order in cases.orders(entry) if is_needed(order)]
    missed = [f"{o.line}: {o.text!r} of {o.place!r}" for o in wanted if not noticed(o, reached)]
    assert not missed, "\n".join([f"of {entry}, nothing notices that these are missing:", *missed])


@pytest.mark.sweep
def test_nothing_is_listed_that_is_not_there() -> None:
    places = {order.place for entry in ENTRIES for order in cases.orders(entry)}
    assert {row.place for row in NOT_NEEDED} <= places
