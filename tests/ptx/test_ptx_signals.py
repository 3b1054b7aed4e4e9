"""Fences that no run can notice are in the PTX: the data of a signal, then the signal, in the order of the source."""

from __future__ import annotations

import re

import pytest
from device.jit_tools import require_compiler
from ptx.cases_ptx_orders import KERNELS

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_STEP = re.compile(r"(fence\.acq_rel\.sys|nvshmem_fence|nvshmem_putmem_signal|nvshmem_quiet|nvshmem_uint64_p)\b")
_LABEL = re.compile(r"\$L\w+:|@%p\d+ bra")
# The header is shown to the network before it is put, and the last signal comes before the next.
BEFORE_A_SIGNAL = ["fence.acq_rel.sys", "nvshmem_fence", "nvshmem_putmem_signal"]
SENDS = {"dispatch_send", "combine_send", "combine_backward_send"}
SIGNALS = {"network": SENDS, "nodes": {*SENDS, "combine_forward"}}  # dispatch-type ops are passed on within the node


def steps_of(ptx: str) -> dict[str, list[list[str]]]:
    """Return the fences and calls of each block of code without branches, by entry."""
    found: dict[str, list[list[str]]] = {}
    blocks: list[list[str]] = []
    for line in ptx.splitlines():
        if head := _ENTRY.search(line):
            blocks = found[head[1]] = [[]]
        elif blocks and _LABEL.search(line):
            blocks.append([])
        elif blocks and (step := _STEP.search(line)):
            blocks[-1].append(step[1])
    return found


@pytest.mark.parametrize("which", SIGNALS)
def test_a_signal_follows_its_header_and_the_last_signal(which: str) -> None:
    require_compiler()
    signals = {
        entry: [block[-3:] for block in blocks if "nvshmem_putmem_signal" in block]
        for entry, blocks in steps_of(KERNELS[which].ptx()).items()
    }
    assert {entry for entry, steps in signals.items() if steps} == SIGNALS[which]
    assert all(steps == [BEFORE_A_SIGNAL] * len(steps) for steps in signals.values())


@pytest.mark.parametrize("which", SIGNALS)
def test_marks_follow_the_last_signals_and_precede_the_end(which: str) -> None:
    require_compiler()
    (closing,) = [block for block in steps_of(KERNELS[which].ptx())["leave"] if "nvshmem_uint64_p" in block]
    assert closing[-4:] == ["nvshmem_quiet", "nvshmem_uint64_p", "nvshmem_uint64_p", "nvshmem_quiet"]
