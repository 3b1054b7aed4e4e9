"""Very many ops on three processes that share whatever cores there are: no error, no wrong bit."""

from __future__ import annotations

import os
from collections.abc import Callable

import harness
import pytest
from cases_soak import soak

OPS = int(os.environ.get("MOE_RT_SOAK_OPS", "20000"))
LIMIT_S = 60 + OPS // 50


@pytest.mark.timeout(LIMIT_S + 60)
def test_soak(make_ranks: Callable[[str, int], harness.Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CASE_TIMEOUT_S", LIMIT_S)
    done = make_ranks("shm", 3).run(soak, OPS)
    assert OPS <= min(done) == max(done)
