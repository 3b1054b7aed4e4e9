"""The torchtitan adapters with the real packages: torchtitan's layers and experts, in bf16, with the guide's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from integrations.third_party import TIMEOUT_S, run_real
from test_torchtitan import PARAMETERS

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 50), pytest.mark.sweep]

LINE = "moe_rt.integrations.torchtitan.token_dispatcher"


@pytest.fixture(scope="module")
def real() -> Callable[[str], Any]:
    return run_real(
        "torchtitan-0.3",
        signatures=("torchtitan_signatures", PARAMETERS),
        no_size=("torchtitan_experts", [LINE]),
        size=("torchtitan_experts", [LINE + '={"num_max_tokens_per_rank": 9}']),
        over_ranks=("torchtitan_parallelized", [9, 4]),
    )


def test_real_signatures(real: Callable[[str], Any]) -> None:
    real("signatures")


@pytest.mark.parametrize("line", ["no_size", "size"])
def test_real_experts(real: Callable[[str], Any], line: str) -> None:
    [differences] = real(line)
    assert max(differences.values()) < 1e-2, differences


def test_real_experts_over_ranks(real: Callable[[str], Any]) -> None:
    """Results equal torchtitan's own all-to-all for uneven token counts, including a rank without tokens."""
    for differences in real("over_ranks"):
        assert max(differences.values()) < 1e-2, differences
