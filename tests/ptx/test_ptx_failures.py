"""Ops that fail in the compiled kernels: every rank raises, and no launch breaks a rule."""

from __future__ import annotations

import re

import pytest
from ptx.cases_ptx_failures import ACTS, outcomes_of_all
from ptx.own_process import isolated

# name -> a message of some rank, and the errors that ranks may raise. A rank that receives the poison word before it
# sees the failure raises GroupPoisoned.
EXPECTED: dict[str, tuple[str, set[str]]] = {
    "silent peer": ("PeerTimeout: dispatch #2 on rank 0: rank 1 announced op 1, expected 2", {"PeerTimeout", ""}),
    "silent peer in backward": (
        "PeerTimeout: .* on rank 0: rank 1 announced op 1, expected 2",
        {"PeerTimeout", "GroupPoisoned", ""},
    ),
    "bad expert id": ("InvalidRouting: .* rank 1 got expert id 99", {"InvalidRouting", "GroupPoisoned"}),
    "no room": ("CapacityOverflow: .* rank 0 would receive 72 rows", {"CapacityOverflow", "GroupPoisoned"}),
    "refused input": ("GroupPoisoned: .* on rank 0: rank 1 failed first", {"InvalidInput", "GroupPoisoned"}),
    "other layer": ("CallOrderMismatch: .* layer tag 6; .* layer tag 5", {"CallOrderMismatch", "GroupPoisoned"}),
    "other op": ("CallOrderMismatch: ", {"CallOrderMismatch", "GroupPoisoned"}),
    "peer that closed": ("GroupClosed: dispatch #2 on rank 0: rank 1 closed its buffer", {"GroupClosed"}),
    "peer that closes late": ("GroupClosed: dispatch #2 on rank 0: rank 1 closed its buffer", {"GroupClosed"}),
    "aborting peer": ("GroupPoisoned: dispatch #2 on rank 0: rank 1 failed first", {"GroupPoisoned", "GroupClosed"}),
    "plan of nobody": (
        "rank 1 refused its input|handle of dispatch #3",
        {"InvalidInput", "CallOrderMismatch", "GroupPoisoned"},
    ),
    "rows missing": ("InvalidInput: .* on rank [01]: .*got 3", {"InvalidInput", "GroupPoisoned"}),
    "corrupt lists": ("CorruptPeer: dispatch #1 .* control data of rank 1", {"CorruptPeer", "GroupPoisoned"}),
}


def judge(name: str, said: list[str]) -> None:
    text, kinds = EXPECTED[name]
    assert any(re.search(text, each) for each in said), said
    assert {each.partition(":")[0] for each in said} <= kinds, said


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    return dict(isolated(outcomes_of_all))


@pytest.mark.parametrize("name", ACTS)
def test_failure(said: dict[str, list[str]], name: str) -> None:
    judge(name, said[name])
