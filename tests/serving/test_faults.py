"""A rank that dies, stops or fails ends every rank's request with an error that names it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving.fault_times import BEYOND_THE_START, TIMEOUT_S
from serving.prompts import LENGTHS, PROMPTS, dealt

from moe_rt.lab.testing.serving.engines import EngineRanks, Failed


def survivors(model: Callable[[str], Path], fault: str, **engine: Any) -> list[Any]:
    """Return the answers of ranks 0 and 2 to requests during which the fault fires on rank 1."""
    ranks = EngineRanks(model("qwen3_moe"), 3, [("MOE_RT_FAULT", fault)], dtype="float32", **engine)
    try:
        assert ranks.started() == [None] * 3
        ranks.ask(dealt(PROMPTS, 3), dealt(LENGTHS, 3))
        return [ranks.answer(0), ranks.answer(2)]
    finally:
        ranks.send_signal(1, signal.SIGCONT)
        ranks.close()


@pytest.mark.parametrize(
    ("does", "raised", "words"),
    [("kill", "PeerDead: ", "rank 1"), ("raise", "GroupPoisoned: ", "rank 1"), ("stop", "PeerTimeout: ", "rank 1")],
)
def test_survivors_name_it(model: Callable[[str], Path], does: str, raised: str, words: str) -> None:
    options = {"additional_config": {"moe_rt": {"timeout_s": TIMEOUT_S}}} if does == "stop" else {}
    fault = f"rank=1,op={BEYOND_THE_START},at=mid_payload,do={does}"
    answers = survivors(model, fault, **options)
    errors = [str(answer) for answer in answers]
    assert all(isinstance(answer, Failed) for answer in answers)
    assert any(raised in error for error in errors)
    for error in errors:
        assert words in error
        assert "moe_rt.errors." in error


def test_a_rank_that_dies_before_it_has_made_its_layers(model: Callable[[str], Path]) -> None:
    fault = "rank=1,op=1,at=pre_rendezvous,do=kill"
    ranks = EngineRanks(model("qwen3_moe"), 3, [("MOE_RT_FAULT", fault)], dtype="float32")
    try:
        said = ranks.started()
        for rank in (0, 2):
            assert "PeerDead: " in str(said[rank])
            assert "rank 1" in str(said[rank])
    finally:
        ranks.close()
