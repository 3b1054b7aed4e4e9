"""Faults that the tool must find: each is injected, and must be reported where it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ptx import faulty_kernels
from ptx.faulty_kernels import in_entry
from ptx.gpu import PtxFault, PtxGpu
from ptx.own_process import isolated, run_on
from support.rounds import full_round
from support.routing import make_spec

BARRIER, ADD = "bar.sync \t0;", "atom.add.acq_rel.gpu"
ACQUIRE, RELEASE = "ld.acquire.sys.b64", "st.release.sys.b64"


def on_two_ranks(make: Callable[..., PtxGpu], how: dict[str, Any], case: Callable[..., Any], *args: Any) -> None:
    run_on(make(**how), 2, case, *args)


def report_of(case: Callable[..., Any], *args: Any, make: Callable[..., PtxGpu] = PtxGpu, **how: Any) -> str:
    with pytest.raises(PtxFault) as raised:
        isolated(on_two_ranks, make, how, case, *args)
    return str(raised.value)


def nothing(buffer: Any) -> None:
    pass


def test_nothing_is_reported_of_what_is_right() -> None:
    isolated(on_two_ranks, PtxGpu, {}, faulty_kernels.round_with, nothing)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (faulty_kernels.words_swapped, "out of bounds: "),
        (faulty_kernels.half_a_vector_off, "misaligned: 16 bytes at "),
        (faulty_kernels.a_row_too_remote, "out of bounds: 16 bytes of global memory"),
        (faulty_kernels.tables_given_back, "out of bounds: "),
    ],
)
def test_arguments(plant: Callable[[Any], None], says: str) -> None:
    report = report_of(faulty_kernels.round_with, plant)
    assert report.startswith(says), report
    assert "at dispatch_send, block " in report
    assert "lane " in report
    assert "from cuda/" in report


@pytest.mark.parametrize("make", [faulty_kernels.HostTables, faulty_kernels.SmallSegments])
def test_memory(make: type[PtxGpu]) -> None:
    report = report_of(faulty_kernels.round_with, nothing, make=make)
    assert report.startswith("out of bounds: "), report


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (in_entry("dispatch_send", BARRIER, ""), "race on shared memory"),
        (in_entry("dispatch_receive", BARRIER, "", 4), "race on shared memory"),
        (in_entry("dispatch_send", ADD, "atom.add.relaxed.gpu"), "race on global memory"),
        (in_entry("dispatch_send", RELEASE, "st.relaxed.sys.b64"), "race on global memory"),
        (in_entry("dispatch_send", RELEASE, "st.release.gpu.b64"), "race on global memory"),
        (in_entry("dispatch_receive", ACQUIRE, "ld.relaxed.sys.b64"), "race on global memory"),
        (in_entry("dispatch_receive", ACQUIRE, "ld.acquire.gpu.b64"), "race on global memory"),
    ],
    ids=["barrier", "index barrier", "last block", "release", "its scope", "acquire", "its scope there"],
)
def test_orders(edit: Callable[[str], str], says: str) -> None:
    report = report_of(full_round, make_spec(2), [12, 7], 1, "random", edit=edit)
    assert report.startswith(says), report
    assert "nothing orders this" in report
    assert report.count("from cuda/") == 2, "both sides are named"
