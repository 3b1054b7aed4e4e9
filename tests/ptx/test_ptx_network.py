"""The network kernels, executed over a network that delivers late, compute what the oracle computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device.jit_tools import require_compiler
from device.test_network import closes_after_its_last_op, dispatches_in_a_row
from ptx import cases_ptx_orders as cases
from ptx.faulty_kernels import in_entry, without
from ptx.gpu import PtxFault
from ptx.modules import ARCH, HERE, sources_with
from ptx.network import UNREACHABLE, NetworkGpu
from ptx.own_process import isolated, run_on
from support.rounds import full_round
from support.routing import make_spec

from moe_rt.engine.gpu import jit
from moe_rt.engine.gpu.libraries import NVSHMEM

TOKENS = [12, 7, 0]
KERNELS: dict[str, dict[str, Any]] = {
    "bf16": dict(dtype=torch.bfloat16, hidden=136),
    "bf16, fp8 there and int8 back": dict(
        dtype=torch.bfloat16, hidden=136, dispatch_dtype=torch.float8_e4m3fn, combine_dtype=torch.int8
    ),
    "rows that return one by one": dict(sums="invariant", hidden=36),
}


def rounds_over_network(sizes: tuple[int, ...], unreachable: str, changes: dict[str, Any], how: dict[str, Any]) -> int:
    """Run a round forward and backward of each size; return the number of lists fetched."""
    gpu = NetworkGpu(unreachable, **how)
    for size in sizes:
        spec = make_spec(size, **changes, placement=[e % size for e in range(9)])
        run_on(gpu, size, full_round, spec, TOKENS[:size], 1, "random")
    return gpu.launched.count("dispatch_fetch")


@pytest.mark.parametrize("unreachable", UNREACHABLE)
@pytest.mark.parametrize("name", KERNELS)
def test_equal_to_the_oracle(name: str, unreachable: str) -> None:
    assert isolated(rounds_over_network, (2, 3), unreachable, KERNELS[name], {}) == 5


def on_two_ranks(edit: Callable[[str], str] | None, case: Callable[..., Any], *args: Any) -> None:
    gpu = NetworkGpu() if edit is None else NetworkGpu(edit=edit)
    run_on(gpu, 2, case, *args)


def test_signals_of_ops_in_a_row() -> None:
    isolated(on_two_ranks, None, dispatches_in_a_row, 2)


def test_closing_does_not_overtake_the_last_signal() -> None:
    isolated(on_two_ranks, None, closes_after_its_last_op, 2)


@pytest.mark.parametrize(
    "name", ["backwards in a row", "closing over a slow network", "rounds on one block", "a refusal on one block"]
)
def test_cases_that_orders_are_taken_from(name: str) -> None:
    """Cases pass without a report when all orders are in place."""
    assert isolated(cases.fault_of, "network", name) == ""


def test_a_row_that_is_overwritten_while_it_is_put() -> None:
    """A warp barrier after each put row keeps the row's memory until it is sent; another row is summed in the same
    place."""
    (order,) = [o for o in cases.orders("network", "combine_send") if "net_.put(" in o.place]
    said = isolated(cases.noticed, "network", order, ["rounds on one block"])
    assert "race on global memory" in said


def test_memory_that_goes_while_something_is_put_there() -> None:
    """A rank that closes waits for its last puts. They may arrive in time by chance."""
    last = [o for o in cases.orders("network", "leave") if o.text == "nvshmem_quiet"][-1]
    said = (isolated(cases.noticed, "network", last, ["closing after an op"]) for _ in range(20))
    assert any("freed too early" in words for words in said)


def test_functions_are_those_of_nvshmem() -> None:
    require_compiler()
    files = {name: (HERE / name).read_text() for name in ("nvshmem_functions.h", "nvshmem_check.cu")}
    with sources_with(files) as root:
        jit.compile_ptx("nvshmem_check.cu", ARCH, {}, library=NVSHMEM, root=root)


def call(name: str) -> str:
    return rf"call\.uni\s+{name},\s*\(\s*\);"


FENCE, MEETING = r"fence\.acq_rel\.sys;", r"bar\.warp\.sync\s[^;]*;"
ROUND = (full_round, make_spec(2, placement=[e % 2 for e in range(9)]), [12, 7], 1, "random")
PAIRS = (dispatches_in_a_row, 1)
# name -> edit that removes or weakens an order, arguments of the case that notices, report.
PLANTED: dict[str, tuple[Callable[[str], str], tuple[Any, ...], str]] = {
    "rows not shown to the network": (without("dispatch_send", FENCE), ROUND, "no fence shows the network the write"),
    "partial rows not shown": (without("combine_send", FENCE), ROUND, "no fence shows the network the write"),
    "a newer signal may come first": (
        without("dispatch_send", call("nvshmem_fence")),
        PAIRS,
        "this write after the write",
    ),
    "a signal before the rows": (
        without("combine_send", call("nvshmem_quiet")),
        ROUND,
        "nothing orders this read after",
    ),
    "lists fetched before the signal": (
        in_entry("dispatch_fetch", "ld.acquire.sys", "ld.relaxed.sys"),
        ROUND,
        "race on global memory",
    ),
    "partial rows read before the signal": (
        in_entry("combine_receive", "ld.acquire.sys", "ld.relaxed.sys"),
        ROUND,
        "race on global memory",
    ),
    "a flag that another lane still reads": (
        in_entry("dispatch_fetch", "bar.sync \t0;", "", 1),
        ROUND,
        "race on shared memory",
    ),
    "a row read before it is here": (without("dispatch_receive", MEETING), ROUND, "race on global memory"),
    "rows not settled": (
        without("combine_backward_receive", FENCE),
        ROUND,
        # dispatch_receive fetches rows earlier; the report must not name it.
        "race on global memory: nothing orders .* write of\n  combine_backward_receive, .*nvshmemx_getmem_warp",
    ),
    "lists not settled": (without("dispatch_fetch", FENCE), ROUND, "race on global memory"),
    "a row put before it is summed": (without("combine_send", MEETING), ROUND, "race on global memory"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_reported(name: str) -> None:
    edit, case, says = PLANTED[name]
    with pytest.raises(PtxFault, match=says) as raised:
        isolated(on_two_ranks, edit, *case)
    assert "from cuda/" in str(raised.value)
