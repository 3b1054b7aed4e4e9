"""Models with MoELayers in DDP, FSDP2 and ZeRO train as one process does; calls that would mix experts are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh import cases_parallel as cases
from mesh import cases_refused_wrappers as refusals
from support.ranks import Ranks, ThreadRanks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_rt.errors import InvalidConfig
from moe_rt.nn.averaging import Mean
from moe_rt.parallel import prepare, wrapping

MakeRanks = Callable[[str, int], Ranks]


def check(results: Any, how: dict[str, Any], changes: dict[str, Any] | None = None) -> None:
    losses, weights = cases.alone(how, changes or {})
    assert losses[-1] < losses[0]
    for got_losses, got in results:
        torch.testing.assert_close(got_losses, losses, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("world", "ep", "how"),
    [
        (2, 2, {}),
        (4, 4, {"clip": "moe_rt"}),
        (4, 2, {"clip": "torch"}),  # two copies of the experts
        (4, 2, {"seeds": True, "mesh": True}),
        (2, 1, {}),  # each rank has all experts, which are averaged as any other parameter
        (2, 2, {"micro": 2}),
        (4, 2, {"micro": 2}),
        (4, 2, {"micro": 2, "no_sync": True, "clip": "torch"}),
        (2, 2, {"clip": "torch", "norm": float("inf"), "foreach": True}),
        (2, 2, {"clip": "torch", "optimizer": "fused"}),
        (2, 2, {"clip": "torch", "optimizer": "foreach"}),
        (4, 2, {"optimizer": "zero", "clip": "torch"}),
        (2, 2, {"ddp": {"static_graph": True}}),
        (2, 2, {"ddp": {"gradient_as_bucket_view": True, "find_unused_parameters": True}, "clip": "torch"}),
    ],
    ids=str,
)
def test_ddp_trains_as_one_process(make_ranks: MakeRanks, world: int, ep: int, how: dict[str, Any]) -> None:
    check(make_ranks("shm", world).run(cases.ddp_steps, ep, how, {}), how)


@pytest.mark.parametrize(
    ("ep", "how"),
    [
        (4, {}),
        (2, {"micro": 2, "clip": "moe_rt"}),
        (2, {"mesh": True}),
        (2, {"shard": True, "micro": 2, "clip": "moe_rt"}),
        (2, {"shard": True, "mesh": True, "clip": "moe_rt"}),
    ],
    ids=str,
)
def test_fsdp_trains_as_one_process(make_ranks: MakeRanks, ep: int, how: dict[str, Any]) -> None:
    check(make_ranks("shm", 4).run(cases.fsdp_steps, ep, how), how)


def test_means_are_of_the_group_that_is_given(make_ranks: MakeRanks) -> None:
    for sums, means in make_ranks("shm", 4).run(cases.in_pairs):
        assert all(t.any() for t in sums)
        torch.testing.assert_close(means, [t / 2 for t in sums], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2", "dp"])
def test_wrappers_refuse_what_is_not_prepared(make_ranks: MakeRanks, wrapper: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(refusals.refused, wrapper, ""):
        with pytest.raises(InvalidConfig, match=r"spread over 2 ranks.* expected moe_rt\.parallel\.prepare\(model\)"):
            raise outcome


@pytest.mark.parametrize("how", ["another module", "copy of experts"])
def test_ddp_refuses_what_is_prepared_in_part(make_ranks: MakeRanks, how: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(refusals.refused, "ddp", how):
        with pytest.raises(InvalidConfig, match="with the model that DistributedDataParallel gets"):
            raise outcome


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_single_ranks_need_nothing(make_ranks: MakeRanks, wrapper: str) -> None:
    assert make_ranks("shm", 1).run(refusals.refused, wrapper, "") == [False]


def test_zero_refuses_experts_before_it_steps(make_ranks: MakeRanks) -> None:
    for outcome in make_ranks("shm", 2).outcomes(refusals.refused_zero):
        with pytest.raises(InvalidConfig, match=r"for moe_rt\.parallel\.expert_parameters\(model\)"):
            raise outcome


def test_groups_that_do_not_fit(make_ranks: MakeRanks) -> None:
    ranks = make_ranks("shm", 4)
    for outcome in ranks.outcomes(refusals.refused_groups, "sizes"):
        with pytest.raises(InvalidConfig, match=r"got an expert-parallel group \[3\] on rank 3, expected groups"):
            raise outcome
    for outcome in ranks.outcomes(refusals.refused_groups, "part")[:2]:
        with pytest.raises(InvalidConfig, match=r"got an expert-parallel group \[0, 1, 2\] on rank 0, expected groups"):
            raise outcome


def test_threads_are_refused() -> None:
    for outcome in ThreadRanks(2).outcomes(refusals.refused_threads):
        with pytest.raises(InvalidConfig, match="got 2 ranks that are threads, expected a ProcessGroup"):
            raise outcome


@pytest.mark.parametrize("first", ["prepare", "shard"])
def test_only_one_of_both_calls(make_ranks: MakeRanks, first: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(refusals.twice, first):
        with pytest.raises(InvalidConfig, match="expected one of the two calls"):
            raise outcome


@pytest.mark.parametrize("over", ["model", "ddp"])
def test_moving_averages(make_ranks: MakeRanks, over: str) -> None:
    for got, expected in make_ranks("shm", 2).run(cases.averages, over):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, check_stride=False)


def test_a_copy_is_prepared_as_well(make_ranks: MakeRanks) -> None:
    for model, copy in make_ranks("shm", 2).run(cases.copied):
        torch.testing.assert_close(copy, model, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["", "assign", "bf16"])
def test_torch_clips_by_the_same_norm(make_ranks: MakeRanks, how: str) -> None:
    results = make_ranks("shm", 2).run(cases.norms, how)
    assert len({theirs for theirs, _ in results}) == 1
    for theirs, ours in results:
        assert theirs == pytest.approx(ours, rel=1e-6)


def test_norms_of_every_kind(make_ranks: MakeRanks) -> None:
    for results in make_ranks("shm", 2).run(cases.kinds):
        for got, expected in results:
            assert got == pytest.approx(expected, rel=1e-5)


def test_ddp_refuses_another_group_than_the_prepared_one(make_ranks: MakeRanks) -> None:
    for outcome in make_ranks("shm", 4).outcomes(refusals.of_another_group):
        with pytest.raises(InvalidConfig, match="got 4 ranks, expected the 2 of the group"):
            raise outcome


def test_importing_does_not_import_the_compiler() -> None:
    """`import moe_rt` does not import the compiler, which takes seconds on every rank of every job."""
    code = "import sys; from moe_rt import *; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_parameters_that_the_user_ignores_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1))
    monkeypatch.setattr(wrapping, "spread_names", lambda module: {"0.weight"} if module is model else set())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    wrapping._name_to_ddp(model)
    assert set(model._ddp_params_and_buffers_to_ignore) == {"0.weight", "0.bias"}


def test_copies_of_all_layers_share_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    inner: list[Any] = [
        SimpleNamespace(
            num_ranks=2,
            process_group=1,
            sharded=False,
            mean=None,
            mark_parameters=lambda module: None,
            check_copies=int,
        )
        for _ in range(3)
    ]
    experts = [("", nn.Linear(1, 1), each) for each in inner]
    copies, made_equal = [(0, 2), (0, 2), (0, 3)], []
    agreed = iter((same, True) for same in copies)

    def new_group(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return SimpleNamespace(group_name=f"group {len(made)}")

    monkeypatch.setattr(wrapping, "spread_modules", lambda model: experts)
    monkeypatch.setattr(wrapping, "_process_group", lambda group: SimpleNamespace(size=lambda: 4))
    monkeypatch.setattr(wrapping, "_agree", lambda *given: next(agreed))
    monkeypatch.setattr(wrapping, "_broadcast", lambda module, group: made_equal.append((module, group.group_name)))
    monkeypatch.setattr(wrapping.dist, "new_group", new_group)
    prepare(nn.Linear(1, 1), object())  # type: ignore[arg-type]
    assert made == [[0, 2], [0, 3]]
    names = ["group 1", "group 1", "group 2"]
    assert [each.mean for each in inner] == [Mean(4, name) for name in names]
    assert made_equal == [(module, name) for (_, module, _), name in zip(experts, names, strict=True)]
