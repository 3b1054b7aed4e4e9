"""Dependent launches: a launch may begin before its predecessor has ended, and must not read its results too soon."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ptx import programs
from ptx.cases_ptx_orders import NETWORK_SPEC, waits_apart
from ptx.faulty_kernels import without
from ptx.gpu import Edit, PtxFault, PtxGpu
from ptx.network import NetworkGpu
from ptx.own_process import isolated, run_on
from support.rounds import full_round, rounds_in_a_row
from support.routing import make_spec

NOT_AWAITED = "a lane ends that has not awaited the launch before"
LET, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
# The first launch ends only after the second has begun; the second then reads the first's last write.
MEETING = f"""atom.add.relaxed.gpu.u64 %rd2, [%rd1], 1;
setp.ne.u64 %p1, %rd2, 0;
@%p1 bra $second;
{LET}
$look:
nanosleep.u32 20;
ld.relaxed.gpu.b64 %rd3, [%rd1+8];
setp.eq.u64 %p2, %rd3, 0;
@%p2 bra $look;
st.global.b64 [%rd1+16], 7;
st.relaxed.gpu.b64 [%rd1+32], 1;
bra $end;
$second:
st.relaxed.gpu.b64 [%rd1+8], 1;
{WAIT}
ld.global.b64 %rd4, [%rd1+16];
st.global.b64 [%rd1+24], %rd4;
$end:"""

# Observe the first launch's write through a flag, which orders nothing.
FLAG = """$flag:
nanosleep.u32 20;
ld.relaxed.gpu.b64 %rd3, [%rd1+32];
setp.eq.u64 %p2, %rd3, 0;
@%p2 bra $flag;"""


@pytest.mark.parametrize("seed", [1, 2])
def test_both_run_at_once(seed: int) -> None:
    words = isolated(_run, MEETING, dict(times=2, seed=seed))
    assert words[:4] == [2, 1, 7, 7]


def _run(body: str, how: dict[str, Any]) -> list[int]:
    return programs.run(body, **how)


def test_what_the_first_wrote_is_awaited() -> None:
    with pytest.raises(PtxFault, match="race on global memory") as raised:
        isolated(_run, MEETING.replace(WAIT, FLAG), dict(times=2))
    assert "nothing orders this read" in str(raised.value)


def test_each_lane_waits_before_it_ends() -> None:
    """A third launch waits for the second, and thereby for the first."""
    with pytest.raises(PtxFault, match=NOT_AWAITED):
        isolated(_run, LET, dict(times=2))
    isolated(_run, f"{WAIT}\n{LET}", dict(times=3))


def _early(body: str, how: dict[str, Any]) -> int:
    programs.run(body, **how)
    return PtxGpu().early()


def test_nobody_begins_before_all_blocks_have_let_it() -> None:
    assert isolated(_early, WAIT, dict(times=3, blocks=2)) == 0
    assert isolated(_early, MEETING, dict(times=2)) == 1


def _ops(how: dict[str, str]) -> tuple[int, list[str]]:
    """Return the number of launches that began early in two rounds, and the kernels launched."""
    os.environ.update(how)
    gpu = PtxGpu()
    run_on(gpu, 2, rounds_in_a_row, make_spec(2), [12, 7], [5, 6], "random")
    return gpu.early(), gpu.launched


def test_ops_begin_their_second_launch_early() -> None:
    early, launched = isolated(_ops, {})
    receiving = sum(name.endswith("_receive") for name in launched)
    assert 0 < early <= receiving


def test_it_can_be_switched_off() -> None:
    early, launched = isolated(_ops, {"MOE_RT_DEPENDENT_LAUNCHES": "0"})
    assert launched
    assert early == 0


RECEIVING = tuple(f"{op}_receive" for op in ("dispatch", "combine", "combine_backward"))
WAITING = tuple(name.replace("receive", "wait") for name in RECEIVING)


def _on(gpu: PtxGpu) -> None:
    run_on(gpu, 2, full_round, make_spec(2), [12, 7], 1, "random")


def _round(edit: Edit) -> None:
    _on(PtxGpu(edit=edit))


def _apart(edit: Edit) -> None:
    waits_apart(_on)(PtxGpu(edit=edit))


def _over_network(edit: Edit) -> None:
    run_on(NetworkGpu(edit=edit), 2, full_round, NETWORK_SPEC, [12, 7], 1, "random")


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        *((_round, name) for name in RECEIVING),
        *((_apart, name) for name in WAITING),
        *((_over_network, name) for name in ("dispatch_fetch", "dispatch_receive")),
    ],
)
def test_no_kernel_reads_before_it_waits(case: Any, kernel: str) -> None:
    """A missing griddepcontrol.wait is reported as a race, or as a lane that stale words led to its end."""
    with pytest.raises(PtxFault, match=f"race on global memory|{NOT_AWAITED}") as raised:
        isolated(case, without(kernel, r"griddepcontrol\.wait;"))
    assert f"{kernel}, block " in str(raised.value)
