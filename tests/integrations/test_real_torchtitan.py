"""The torchtitan adapters with the real packages: their own layers and experts, in bf16, with the line of the guide."""

from __future__ import annotations

import pytest
from test_torchtitan import PARAMETERS
from third_party import TIMEOUT_S, run_real

pytestmark = pytest.mark.timeout(TIMEOUT_S + 50)

LINE = "moe_rt.integrations.torchtitan.token_dispatcher"


def test_real_signatures() -> None:
    run_real("torchtitan-0.3", "torchtitan_signatures", PARAMETERS)


@pytest.mark.parametrize("line", [LINE, LINE + '={"num_max_tokens_per_rank": 9}'], ids=["no size", "size"])
def test_real_experts(line: str) -> None:
    [differences] = run_real("torchtitan-0.3", "torchtitan_experts", [line])
    assert max(differences.values()) < 1e-2, differences


def test_real_experts_over_ranks() -> None:
    """Next to torchtitan's own all-to-all, on as many tokens as each rank has, none included."""
    for differences in run_real("torchtitan-0.3", "torchtitan_parallelized", [9, 4]):
        assert max(differences.values()) < 1e-2, differences
