"""Experts modules of Transformers over ranks: every layout, any number of tokens, and unused rows that hold NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.forked_python import run_python
from support.needs_transformers import require_transformers
from support.ranks import Ranks

require_transformers()

from integrations import cases_transformers_experts as cases  # noqa: E402
from integrations.transformers_models import EXPERTS, WITH_NORM  # noqa: E402

MakeRanks = Callable[[str, int], Ranks]
GROUPED = [family for family in EXPERTS if family != WITH_NORM]


@pytest.mark.parametrize("tokens", [[9, 4], [0, 5], [0, 0]], ids=str)
@pytest.mark.parametrize("family", EXPERTS)
def test_equal_the_whole_module(make_ranks: MakeRanks, family: str, tokens: list[int]) -> None:
    for differences in make_ranks("shm", 2).run(cases.equal_whole_module, family, "grouped_mm", tokens):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("tokens", [[0, 5], [0, 0]], ids=str)
def test_a_loop_over_experts_without_tokens(make_ranks: MakeRanks, tokens: list[int]) -> None:
    """The loop stays in the graph if it visits no expert; otherwise peers would wait in backward."""
    for differences in make_ranks("shm", 2).run(cases.equal_whole_module, "mixtral", "eager", tokens):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", WITH_NORM])
def test_rows_without_tokens_on_a_gpu(make_ranks: MakeRanks, family: str, implementation: str) -> None:
    """Unused rows that hold NaN change no result when the count of real rows stays on the device."""
    for differences in make_ranks("shm", 2).run(cases.equal_whole_module, family, implementation, [9, 4], True):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bfloat16(make_ranks: MakeRanks, family: str) -> None:
    for differences in make_ranks("shm", 2).run(cases.equal_whole_module, family, "grouped_mm", [9, 4], False, True):
        assert max(differences.values()) < 2e-2, differences


def test_a_group_of_one_rank(make_ranks: MakeRanks) -> None:
    [differences] = make_ranks("shm", 1).run(cases.equal_whole_module, "gpt_oss", "grouped_mm", [9])
    assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("without", ["gate_up_proj", "down_proj"])
def test_a_plan_that_leaves_experts_whole(make_ranks: MakeRanks, without: str) -> None:
    for raised in make_ranks("shm", 2).run(cases.refused_plan, "qwen3_moe", without):
        assert raised.startswith("InvalidConfig: ep_plan: got ")
        assert f"{without} of 8 experts, whole on every rank, expected 4 on each of 2 ranks" in raised


def test_old_transformers_are_refused() -> None:
    """A module without the registry, as in transformers before 5.23, is refused."""
    script = (
        "import sys, types\n"
        "sys.modules['transformers.distributed.expert_parallel'] = types.ModuleType('old')\n"
        "try:\n    import moe_rt.integrations.transformers\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = run_python("-c", script)
    assert "expected 5.23 or later; pip install '.[transformers]'" in done.stdout
