"""Third-party trainers and optimizers, in an environment that has them, work or are refused with a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integrations.third_party import TIMEOUT_S, run_real

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 50), pytest.mark.sweep]

OPTIMIZERS = ("prodigy", "dadapt adam", "dadapt sgd")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    directories = [str(tmp_path_factory.mktemp("lightning")) for _ in range(2)]
    return run_real(
        "trainers",
        Path(__file__).with_name("outside_job.py"),
        **{name: ("optimizer", name) for name in OPTIMIZERS},
        **{f"zero {stage}": ("deepspeed", stage) for stage in range(4)},
        lightning=("lightning", directories[0], False),
        recipe=("lightning", directories[1], True),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_find_the_step_of_one_process(real: Callable[[str], Any], name: str) -> None:
    *ranks, alone = real(name)
    for rank in ranks:
        assert rank == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_is_refused(real: Callable[[str], Any], stage: int) -> None:
    for said in real(f"zero {stage}")[:2]:
        assert said.startswith("InvalidConfig: broadcast of experts: got weights that differ between ranks")


def test_a_lightning_checkpoint_is_refused_elsewhere(real: Callable[[str], Any]) -> None:
    own, other, _ = real("lightning")
    assert own == "not refused"
    assert "got experts [0, 1], expected this rank's, [2, 3], or all of them" in other


def test_lightning_saves_whole_experts(real: Callable[[str], Any]) -> None:
    for answer in real("recipe")[:2]:
        assert answer == [3, True, True, True]
