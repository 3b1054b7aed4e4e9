"""Gradients are added up over all ranks, and clipped by one norm that counts every expert once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from train import cases_train as cases

from moe_rt.errors import InvalidConfig
from moe_rt.lab.testing.ports import free_ports
from moe_rt.train import parallel

MakeRanks = Callable[[str, int], Ranks]


def test_norm_sums_over_the_experts_of_all_ranks(make_ranks: MakeRanks) -> None:
    squares = [10.0, 20.0, 40.0, 50.0]
    results = make_ranks("shm", 4).run(cases.clipped_norm, squares)
    norms = {norm for norm, _ in results}
    assert len(norms) == 1, "every rank clips with the same norm"
    assert norms.pop() == pytest.approx(10.954, abs=1e-3)
    assert [left for _, left in results] == pytest.approx([square / 120 for square in squares], rel=1e-4)


@pytest.mark.parametrize(
    ("ep", "experts"),
    [
        (4, [0, 10, 20, 30]),  # each expert is on one rank
        (2, [20, 40, 20, 40]),  # 0 + 20 and 10 + 30
        (1, [60, 60, 60, 60]),
    ],
)
def test_sums(make_ranks: MakeRanks, ep: int, experts: list[float]) -> None:
    results = make_ranks("shm", 4).run(cases.added_up, ep)
    assert [shared for shared, _ in results] == [6] * 4
    assert [expert for _, expert in results] == experts


def test_gradients_are_where_their_parameters_are() -> None:
    some = [nn.Parameter(torch.empty(n, device="meta")) for n in (3, 0, 2)]
    flat = parallel._flat_gradient(iter(some), torch.device("meta"))
    assert (flat.device.type, flat.shape) == ("meta", (5,))
    assert [p.grad.shape for p in some if p.grad is not None and p.grad._base is flat] == [(3,), (0,), (2,)]


def test_what_a_step_reports_is_of_all_ranks(make_ranks: MakeRanks) -> None:
    """Every rank reports the same means over ranks; the load of an expert is its share of what all tokens chose."""
    of_ranks = make_ranks("shm", 4).run(cases.rows_of_steps, {"ep": 4})
    alone = cases.rows_of_steps(None, {})
    for steps in zip(*of_ranks, alone, strict=True):
        *rows, one = [row for row, _ in steps]
        chosen = sum(torch.tensor(counts) for _, counts in steps[:-1])
        assert chosen.tolist() == steps[-1][1], "the routing is that of one process"
        assert int(chosen.max()) > int(chosen.min())
        for row in (*rows, one):
            torch.testing.assert_close(torch.tensor(row["expert_load"]), (chosen / chosen.sum(1, keepdim=True)))
            for name in ("loss", "grad_norm", "aux_loss", "lr", "step"):
                assert row[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_group_made_here_ends_with_the_block_and_a_given_one_stays(
    monkeypatch: pytest.MonkeyPatch, by_torchrun: bool
) -> None:
    given, make = [], dist.init_process_group
    if by_torchrun:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports())}
        for name, value in place.items():
            monkeypatch.setenv(name, value)

    def noted(*arguments: Any, **options: Any) -> None:
        given.append(options.get("timeout"))
        make(*arguments, **options)

    monkeypatch.setattr(dist, "init_process_group", noted)
    with contextlib.suppress(KeyError), parallel.process_group("cpu", 750.0):
        with parallel.process_group("cpu", 900.0):
            pass
        assert dist.is_initialized()
        raise KeyError
    assert not dist.is_initialized()
    assert given == [timedelta(seconds=750)]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing GPU is reported with torch's reason."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(parallel, "why_there_is_none", lambda: "; torch says: no driver")
    says = "device: got cuda for local rank 0, expected one of 0 GPUs; torch says: no driver"
    with pytest.raises(InvalidConfig, match=says), parallel.process_group("cuda", 1.0):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 3}, "ep: got 3, expected a divisor of the world size 4"),
        ({"ep": 0}, "ep: got 0"),
        ({"num_experts": 3}, "num_experts: got 3, expected at least one for each of 4"),
        ({"batch_size": 6}, "batch_size: got 6, expected a multiple of the world size 4"),
        ({"batch_size": 6, "ep": 2}, "batch_size: got 6, expected a multiple of the world size 4"),
    ],
)
def test_world_that_does_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        cases.tiny(**changes).check_world(4)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_world_that_just_fits(ep: int) -> None:
    assert cases.tiny(ep=ep, num_experts=ep, num_topk=1, batch_size=4).check_world(4) == ep


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_of_all_layers_end_with_the_block(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    ended: list[Any] = []

    class Buffer(contextlib.nullcontext[None]):
        def __exit__(self, kind: Any, *_: Any) -> None:
            ended.append((self, kind))

    layers = [SimpleNamespace(buffer=Buffer()) for _ in range(3)]
    monkeypatch.setattr(parallel, "moe_layers", lambda model: layers)
    with contextlib.suppress(ZeroDivisionError), parallel.open_buffers(nn.Module()):
        assert not ended
        if fails:
            1 / 0  # noqa: B018
    assert ended == [(layer.buffer, ZeroDivisionError if fails else None) for layer in reversed(layers)]


def test_ranks_share_a_batch_in_contiguous_parts() -> None:
    group: Any = None
    parts = [parallel.Ranks(rank, 4, group, group).share(12) for rank in range(4)]
    assert parts == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
