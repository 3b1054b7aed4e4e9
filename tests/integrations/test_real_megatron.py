"""The Megatron manager with the real Megatron-Core: signatures, six steps without DeepEP, its overflow protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from integrations.third_party import TIMEOUT_S, run_real
from test_megatron import DISPATCHER_ATTRIBUTES, PARAMETERS

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 50), pytest.mark.sweep]


@pytest.fixture(scope="module")
def real() -> Callable[[str], Any]:
    return run_real(
        "megatron-core",
        signatures=("megatron", 1, "check_signatures", PARAMETERS, DISPATCHER_ATTRIBUTES),
        dispatcher=("megatron", 2, "equal_dense", [9, 4], {}),
    )


def test_real_signatures(real: Callable[[str], Any]) -> None:
    real("signatures")


def equal(results: list[dict[str, float]]) -> None:
    for differences in results:
        assert max(differences.values()) < 1e-5, differences


def test_real_dispatcher(real: Callable[[str], Any]) -> None:
    """Megatron's own six steps agree with a dense layer, with the manager from its constructor and from `install`."""
    equal(real("dispatcher"))


def test_real_dispatcher_with_a_size() -> None:
    equal(run_real("megatron-core", it=("megatron", 2, "equal_dense", [9, 4], {"num_max_tokens_per_rank": 9}))("it"))


def test_real_rerun_over_budget() -> None:
    """A step over budget on one rank is reported, and its outputs are wrong; the rerun is right and not reported."""
    seen = run_real("megatron-core", it=("megatron", 2, "over_budget"))("it")
    for step, over, right in ((0, True, False), (1, False, True), (2, True, False)):
        assert any(steps[step][0] for steps in seen) is over
        assert all(steps[step][1] for steps in seen) is right
