"""Very many ops, and whole lives, on three processes on any number of cores: no error, no wrong bit."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import support.ranks
from soak.cases_lives import ACTS, live
from soak.cases_soak import soak

MakeRanks = Callable[[str, int], support.ranks.Ranks]
OPS = int(os.environ.get("MOE_RT_SOAK_OPS", "5000"))
OPS_LIMIT_S = 600 + OPS // 5  # only a hang reaches it, as all such limits
SEED = int(os.environ.get("MOE_RT_SOAK_SEED", "0"))
MINUTES = float(os.environ.get("MOE_RT_SOAK_MINUTES", "0"))
LIVES = 20  # acts, and at least MINUTES
LIVES_LIMIT_S = 1800 + 120 * MINUTES


@pytest.mark.timeout(OPS_LIMIT_S + 60)
def test_soak(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.ranks, "CASE_TIMEOUT_S", OPS_LIMIT_S)
    done = make_ranks("shm", 3).run(soak, OPS)
    assert OPS <= min(done) == max(done)


@pytest.mark.timeout(LIVES_LIMIT_S + 60)
def test_lives(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random groups, buffers, layers, forks, refusals and ends in random modes give right results and leak nothing."""
    monkeypatch.setattr(support.ranks, "CASE_TIMEOUT_S", LIVES_LIMIT_S)
    outcomes = make_ranks("shm", 3).outcomes(live, SEED, LIVES, 60 * MINUTES)
    errors = [o for o in outcomes if isinstance(o, BaseException)]
    assert not errors, f"seed {SEED}: " + "\n".join(f"{e!r}\n" + "\n".join(getattr(e, "__notes__", [])) for e in errors)
    print(f"seed {SEED}: {outcomes[0]['acts']}")
    assert [outcome["left"] for outcome in outcomes] == [{}] * 3
    assert all(outcome["acts"] == outcomes[0]["acts"] for outcome in outcomes)
    assert set(outcomes[0]["acts"]) == set(ACTS)
