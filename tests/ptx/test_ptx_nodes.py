"""The two-level kernels, executed over a network that delivers late, and over mapped ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ptx import cases_ptx_orders as cases
from ptx.cases_ptx_nodes import NODES as NODES_OF_THREE
from ptx.faulty_kernels import without
from ptx.gpu import PtxFault, PtxGpu
from ptx.network import NetworkGpu
from ptx.own_process import isolated, run_on
from ptx.test_ptx_graphs import capture_and_replay
from ptx.test_ptx_network import FENCE, MEETING, call
from support.rounds import full_round
from support.routing import make_spec

NODES = {"2+2": (0, 0, 1, 1), "1+1+1": (0, 1, 2)}
CODED: dict[str, Any] = dict(
    dtype=torch.bfloat16, hidden=136, dispatch_dtype=torch.float8_e4m3fn, combine_dtype=torch.int8
)


def rounds_over(nodes: Sequence[int], changes: dict[str, Any], over_network: bool = True) -> list[str]:
    """Run a round forward and backward; return the kernels launched."""
    gpu = NetworkGpu(nodes=nodes) if over_network else PtxGpu()
    gpu.nodes = nodes
    size = len(nodes)
    spec = make_spec(size, route="two_level", **changes, placement=[e % size for e in range(9)])
    run_on(gpu, size, full_round, spec, [12, 7, 0, 5][:size], 1, "random")
    return gpu.launched


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in NODES), *(pytest.param(name, CODED, marks=pytest.mark.sweep) for name in NODES)],
)
def test_equal_to_the_oracle(name: str, changes: dict[str, Any]) -> None:
    launched = isolated(rounds_over, NODES[name], changes)
    assert launched.count("dispatch_forward") == launched.count("dispatch_lists") == len(NODES[name])
    assert {"combine_forward", "combine_backward_forward"} <= set(launched)


def test_rehearsal_among_mapped_ranks() -> None:
    assert "dispatch_forward" in isolated(rounds_over, (0, 0, 1), {}, False)


def replayed(nodes: Sequence[int]) -> None:
    gpu = NetworkGpu(nodes=nodes)
    run_on(gpu, len(nodes), capture_and_replay, gpu, {"route": "two_level"})


def test_replays() -> None:
    isolated(replayed, (0, 0, 1))


@pytest.mark.parametrize("name", ["a bad id of a served rank", "a silent neighbour", "a silent rank that is served"])
def test_failures(name: str) -> None:
    """Failures end as on the emulated GPU, without a report when all orders are in place."""
    assert isolated(cases.fault_of, "nodes", name) == ""


def one_round(edit: Callable[[str], str], changes: dict[str, Any]) -> None:
    gpu = NetworkGpu(nodes=NODES_OF_THREE, edit=edit)
    spec = make_spec(3, route="two_level", **changes, placement=[(8 - e) % 3 for e in range(9)])
    run_on(gpu, 3, full_round, spec, [12, 7, 12], 1, "random")


# name -> edit that removes or weakens an order, report.
PLANTED: dict[str, tuple[Callable[[str], str], str]] = {
    "rows not settled": (without("dispatch_forward", FENCE), "race on global memory"),
    "sums not shown to the network": (without("combine_forward", FENCE), "no fence shows the network the write"),
    "a signal before the sums": (without("combine_forward", call("nvshmem_quiet")), "nothing orders this read after"),
    "rows staged before the signal": (
        without("combine_backward_forward", r"ld\.acquire\.sys", "ld.relaxed.sys"),
        "race on global memory",
    ),
    "lists not settled": (without("dispatch_lists", FENCE), "race on global memory"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_reported(name: str) -> None:
    edit, says = PLANTED[name]
    with pytest.raises(PtxFault, match=says) as raised:
        isolated(one_round, edit, {})
    assert "from cuda/" in str(raised.value)


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", ["combine_forward", "combine_receive"])
def test_lanes_meet_before_they_read_codes_of_each_other(kernel: str) -> None:
    with pytest.raises(PtxFault, match="race on global memory"):
        isolated(one_round, without(kernel, MEETING), CODED)
