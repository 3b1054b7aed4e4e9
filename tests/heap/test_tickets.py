"""A rank's ticket for a meeting: other ranks see whether it is valid, and notice when it no longer is."""

from __future__ import annotations

import json

import torch.distributed as dist

from moe_rt.group.attendance import Attendance


def test_tickets_of_ranks() -> None:
    """A rank has none before it comes, after it has left, and once its ticket is used in a meeting."""
    store = dist.HashStore()
    one, other = (Attendance(store, rank, 2) for rank in range(2))
    assert [other.ticket_of(0), other.ticket_of(0, now=True), other.seen_at(0)] == ["", "", ("", False)]
    one.come()
    assert len(one.ticket) >= 16, "no other rank draws the same"
    assert [other.ticket_of(0), other.ticket_of(0, now=True)] == [one.ticket] * 2
    other.take_place("a meeting", [one.ticket, other.ticket])
    assert other.ticket_of(0) == ""
    one.come()
    assert other.seen_at(0) == (one.ticket, False)
    one.withdraw()
    assert [other.ticket_of(0), other.ticket_of(0, now=True)] == ["", ""]
    store.set("moe_rt/places/0", json.dumps({**json.loads(store.get("moe_rt/places/0")), "ticket": "t", "since": 1.0}))
    assert [other.ticket_of(0), other.ticket_of(0, now=True)] == ["t", ""], "of an earlier job"


def test_changes_are_counted_if_tickets_become_invalid() -> None:
    """A first ticket, and one after a meeting that took place, makes none invalid."""
    store = dist.HashStore()
    rank = Attendance(store, 0, 1)
    rank.withdraw()
    rank.come()
    assert rank.changes() is None
    rank.take_place("a meeting", [rank.ticket])
    rank.come()
    assert rank.changes() is None
    rank.come()
    assert rank.changes() == "1"
    rank.withdraw()
    assert rank.changes() == "2"
    rank.withdraw()
    rank.come()
    assert rank.changes() == "2"
    restarted = Attendance(store, 0, 1)
    restarted.come()
    assert rank.changes() == "3", "a ticket of an earlier job may have been there"
