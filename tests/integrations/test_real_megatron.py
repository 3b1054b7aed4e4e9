"""The Megatron manager with the real Megatron-Core: signatures, six steps without DeepEP, its overflow protocol."""

from __future__ import annotations

import pytest
from test_megatron import DISPATCHER_ATTRIBUTES, PARAMETERS
from third_party import TIMEOUT_S, run_real

pytestmark = pytest.mark.timeout(TIMEOUT_S + 50)


def test_real_signatures() -> None:
    run_real("megatron-core", "megatron_signatures", PARAMETERS, DISPATCHER_ATTRIBUTES)


@pytest.mark.parametrize(
    "options", [pytest.param({"num_max_tokens_per_rank": 9}, marks=pytest.mark.sweep), {}], ids=["size", "no size"]
)
def test_real_dispatcher(options: dict[str, int]) -> None:
    """Megatron's own six steps, with the manager from its constructor and from `install`."""
    for differences in run_real("megatron-core", "megatron_dispatcher", [9, 4], options):
        assert max(differences.values()) < 1e-5, differences


def test_real_rerun_over_budget() -> None:
    """Over budget on some rank: told, and outputs are wrong; the rerun is right, and nothing is left to tell."""
    seen = run_real("megatron-core", "megatron_over_budget")
    for step, over, right in ((0, True, False), (1, False, True), (2, True, False)):
        assert any(steps[step][0] for steps in seen) is over
        assert all(steps[step][1] for steps in seen) is right
