"""Complaints of moe-rt chaos, one of each kind, and options of the buffers that its ranks make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.signatures import misplaced, unlike_defaults

from moe_rt.lab.chaos import outcome, worker

GOOD: dict[str, Any] = {
    "raised": "nothing", "then": "nothing", "made": True, "steps": 3, "descriptors": 0, "threads": 0, "segments": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"descriptors": 1}, "rank 1 kept 1 descriptors"),
        ({"threads": 1}, "rank 1 kept 1 threads"),
        ({"segments": 1}, "rank 1 kept 1 segments"),
        ({"descriptors": 2, "segments": 1}, "rank 1 kept 2 descriptors, 1 segments"),
        ({"descriptors": -1}, None),  # one that was open before is closed now
        ({"raised": "PeerDead"}, "rank 1 completed a step after PeerDead"),
        ({"raised": "PeerDead", "then": "PeerDead"}, None),
        ({"raised": "PeerDead", "made": False}, None),
        ({"raised": "killed", "descriptors": 9}, None),
        ({"raised": "hung", "threads": 9}, None),
    ],
    ids=str,
)
def test_what_is_left_after_all(changes: dict[str, Any], complaint: str | None) -> None:
    reports = {0: GOOD, 1: {**GOOD, **changes}}
    assert outcome.after_all(reports) == ([] if complaint is None else [complaint])


def test_steps_that_are_not_done() -> None:
    reports = {0: GOOD, 1: {**GOOD, "steps": 2}, 2: {**GOOD, "steps": 4}, 3: {**GOOD, "steps": 0, "raised": "killed"}}
    expected = ["rank 1 completed 2 steps, expected 3", "rank 2 completed 4 steps, expected 3"]
    assert outcome.not_done(reports, 3) == expected


def test_ranks_that_raised_another_error() -> None:
    reports = {0: GOOD, 1: {**GOOD, "raised": "PeerDead", "message": "rank 1: first line\nsecond"}}
    assert outcome.not_raised(reports, [0], {"nothing"}) == []
    assert outcome.not_raised(reports, [0, 1], {"PeerDead", "GroupPoisoned"}) == [
        "rank 0 raised nothing, expected GroupPoisoned or PeerDead: "
    ]
    assert outcome.not_raised(reports, [1], {"nothing"}) == [
        "rank 1 raised PeerDead, expected nothing: rank 1: first line"
    ]


def test_the_span_of_times() -> None:
    assert outcome.span([]) == ""
    assert outcome.span([3.0, 1.0, 9.0]) == "3.0 / 9.0"


def test_options_of_a_rank_reach_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: dict[str, Any] = {}
    monkeypatch.setattr(worker, "Buffer", lambda group, **options: arrived.update(options))
    given = unlike_defaults(worker.Size)
    worker.make_buffer(None, 3, worker.Size(**given), timeout_s=1.5, init_timeout_s=2.5)
    sizes = dict(num_max_tokens_per_rank=given.pop("tokens"), num_topk=2, num_experts=6, dtype=torch.float32)
    assert misplaced({**given, **sizes, "timeout_s": 1.5, "init_timeout_s": 2.5}, arrived) == {}
