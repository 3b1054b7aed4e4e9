"""Loading what rank 0 saved by itself is refused with a message, and whole experts load on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import cases_savers as cases
from replicas.cases_replicas import net, whole
from support.forked_python import run_python
from support.ranks import Ranks

from moe_rt.config.placement import Placement
from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("saver", "over"), [*((saver, over) for saver in cases.SAVERS for over in ("bare", "ddp")), ("torch.save", "mesh")]
)
def test_a_file_of_rank_0_is_refused_elsewhere(make_ranks: MakeRanks, tmp_path: Path, saver: str, over: str) -> None:
    own, other = make_ranks("shm", 2).outcomes(cases.of_rank_0, str(tmp_path / "file"), saver, over)
    assert own is True, own
    with pytest.raises(InvalidConfig, match=r"ranks hold different experts|it was saved on another rank"):
        raise other


@pytest.mark.parametrize("over", ["bare", "prepared"])
def test_an_optimizer_of_rank_0_is_refused_elsewhere(make_ranks: MakeRanks, tmp_path: Path, over: str) -> None:
    own, other = make_ranks("shm", 2).outcomes(cases.optimizer_of_rank_0, str(tmp_path / "file"), over)
    assert own is None
    with pytest.raises(InvalidConfig, match=r"optimizer state exp_avg: got experts \[0, 1\]"):
        raise other


def test_distributed_checkpoints_need_a_mesh(make_ranks: MakeRanks, tmp_path: Path) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.dcp_over_a_group, str(tmp_path / "dcp")):
        with pytest.raises(Exception, match=r"InvalidConfig: load: got experts .* saved on another rank"):
            raise outcome


def test_every_rank_gets_back_its_own_file(make_ranks: MakeRanks, tmp_path: Path) -> None:
    assert make_ranks("shm", 2).run(cases.own_state_comes_back, str(tmp_path / "file")) == [True, True]


def test_files_load_without_this_package(make_ranks: MakeRanks, tmp_path: Path) -> None:
    make_ranks("shm", 2).run(cases.own_state_comes_back, str(tmp_path / "file"))
    make_ranks("shm", 2).run(cases.save_whole, str(tmp_path / "whole"), {})
    code = (
        "import sys, torch\nweights, states = torch.load(sys.argv[1])\n"
        "whole = torch.load(sys.argv[2])\n"
        "assert type(weights['moe.experts.down_proj']) is torch.Tensor\n"
        "assert weights['moe.experts.down_proj'].shape == (2, 16, 24)\n"
        "assert whole['model']['moe.experts.down_proj'].shape == (4, 16, 24)\n"
        "assert not any(name.startswith('moe_rt') for name in sys.modules)\n"
    )
    done = run_python("-c", code, tmp_path / "file-1", tmp_path / "whole")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["LocalSGD", "save_state"])
def test_accelerate_is_refused(make_ranks: MakeRanks, tmp_path: Path, how: str) -> None:
    outcomes = make_ranks("shm", 2).outcomes(cases.accelerated, str(tmp_path), how)
    for outcome in outcomes[how == "save_state" :]:
        with pytest.raises(InvalidConfig, match=r"leave out|ranks hold different experts"):
            raise outcome


def test_accelerate_saves_whole_experts(make_ranks: MakeRanks, tmp_path: Path) -> None:
    assert make_ranks("shm", 2).run(cases.accelerated, str(tmp_path), "whole") == [True, True]


CHANGES: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"num_experts": 5},
    "scattered": {"num_experts": 6, "placement": "scattered"},
    "biases": {"biases": True, "balance_bias": True},
}


SCATTERED = {4: [3, 0, 2, 1, 0, 3], 2: [1, 0, 0, 1, 1, 1]}


def placed(changes: dict[str, Any], ranks: int) -> dict[str, Any]:
    if "placement" not in changes:
        return changes
    return {**changes, "placement": Placement.from_ranks(SCATTERED[ranks])}


@pytest.mark.parametrize("name", CHANGES)
def test_whole_experts_go_on_with_any_number_of_ranks(make_ranks: MakeRanks, tmp_path: Path, name: str) -> None:
    changes, path = CHANGES[name], str(tmp_path / "whole")
    expected = make_ranks("shm", 4).run(cases.save_whole, path, placed(changes, 4))[0]
    for ranks in (4, 2):
        for losses in make_ranks("shm", ranks).run(cases.load_whole, path, placed(changes, ranks)):
            assert losses == pytest.approx(expected, rel=1e-5)
    alone = {key: value for key, value in changes.items() if key != "placement"}
    assert cases.load_whole(None, path, alone) == pytest.approx(expected, rel=1e-5)


def test_states_that_were_loaded_are_gathered(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.whole_states_of_a_loaded_optimizer) == [True, True]


def test_experts_are_gathered_from_their_group_only(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 4).run(cases.whole_of_pairs) == [True] * 4


def test_a_file_of_one_process_spreads_over_ranks(make_ranks: MakeRanks, tmp_path: Path) -> None:
    path = tmp_path / "alone"
    with net(None, prepared=False) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        cases.steps(model, optimizer, None, (0, 1))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        expected = cases.steps(model, optimizer, None, (2, 3))
        assert whole(model).keys() == dict(model.named_parameters()).keys()
    for losses in make_ranks("shm", 2).run(cases.load_whole, str(path), {}):
        assert losses == pytest.approx(expected, rel=1e-5)
