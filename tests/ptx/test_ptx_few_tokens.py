"""Compiled kernels of buffers for one or two tokens: the oracle's bits, no race, and each missing order is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ptx.faulty_kernels import in_entry
from ptx.gpu import PtxFault, PtxGpu
from ptx.own_process import isolated, run_on
from support.ranks import ThreadRanks
from support.rounds import rounds_in_a_row
from support.routing import make_spec

ROUNDS = ([1, 2, 3], "random")
CODED = dict(dtype=torch.bfloat16, hidden=144, dispatch_dtype=torch.float8_e4m3fn, combine_dtype=torch.int8)
OTHERWISE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "aligned": dict(expert_alignment=16),
    "rows of tokens": dict(layout="tokens"),
    "rows that return one by one": dict(sums="invariant"),
    "dropped": dict(capacity_factor=0.4, overflow="drop"),
}


def tokens_for(size: int) -> list[int]:
    return [(2, 0, 1, 2)[rank] for rank in range(size)]


def rounds_of_sizes(changes: dict[str, Any]) -> None:
    gpu = PtxGpu()
    for size in (1, 2, 3, 4):
        spec = make_spec(size, num_max_tokens_per_rank=2, **changes)
        ThreadRanks(size, gpu).run(rounds_in_a_row, spec, tokens_for(size), *ROUNDS)
    assert {"dispatch_whole", "combine_whole"} <= set(gpu.launched)


def rounds_of_kinds() -> None:
    gpu = PtxGpu(2)
    for changes in OTHERWISE.values():
        spec = make_spec(2, num_max_tokens_per_rank=2, **changes)
        ThreadRanks(2, gpu).run(rounds_in_a_row, spec, [2, 1], *ROUNDS)
    assert "dispatch_send" not in gpu.launched


def test_equal_to_the_oracle() -> None:
    isolated(rounds_of_sizes, {})


def test_coded_rows() -> None:
    isolated(rounds_of_sizes, CODED)


def test_with_other_layouts() -> None:
    isolated(rounds_of_kinds)


def rounds_with_a_fault(edit: Callable[[str], str]) -> None:
    spec = make_spec(2, num_max_tokens_per_rank=2)
    run_on(PtxGpu(edit=edit), 2, rounds_in_a_row, spec, [2, 2], [1, 2, 3], "topk")


BARRIER, ACQUIRE, RELEASE = "bar.sync \t0;", "ld.acquire.sys.b64", "st.release.sys.b64"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (in_entry("dispatch_whole", BARRIER, ""), "race on shared memory"),
        (in_entry("dispatch_whole", RELEASE, "st.relaxed.sys.b64"), "race on global memory"),
        (in_entry("dispatch_whole", RELEASE, "st.release.gpu.b64"), "race on global memory"),
        (in_entry("dispatch_whole", ACQUIRE, "ld.relaxed.sys.b64"), "race on global memory"),
        (in_entry("combine_whole", RELEASE, "st.relaxed.sys.b64"), "race on global memory"),
        (in_entry("combine_whole", ACQUIRE, "ld.relaxed.sys.b64"), "race on global memory"),
    ],
    ids=["copies", "release", "its scope", "acquire", "release of combine", "acquire of combine"],
)
def test_orders(edit: Callable[[str], str], says: str) -> None:
    with pytest.raises(PtxFault) as raised:
        isolated(rounds_with_a_fault, edit)
    report = str(raised.value)
    assert report.startswith(says), report
    assert "nothing orders this" in report
