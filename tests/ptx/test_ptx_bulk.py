"""Bulk copies and barriers that count their bytes: copies take time, and an access that does not wait for them is a
race."""

from __future__ import annotations

import pytest
from ptx.gpu import PtxFault
from ptx.own_process import isolated
from ptx.programs import run

BYTES = 512
WORDS = BYTES // 8
THREADS = 64
# Layout of shared memory: two barriers, then two slots of BYTES. %r2, %r3 are the barriers, %r4, %r5 the slots; %p1 is
# lane 0. Each lane has a word of global memory at %rd3, and a word of the first slot at %r7.
HEAD = f"""mov.u32 %r1, %tid.x;
mov.u32 %r2, room;
add.s32 %r3, %r2, 8;
add.s32 %r4, %r2, 16;
add.s32 %r5, %r4, {BYTES};
setp.eq.u32 %p1, %r1, 0;
mul.wide.u32 %rd2, %r1, 8;
add.s64 %rd3, %rd1, %rd2;
cvt.u32.u64 %r6, %rd2;
add.s32 %r7, %r4, %r6;
add.s64 %rd8, %rd1, {2 * BYTES};
"""
MAKE = """@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
IN = "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
OUT = "@%p1 cp.async.bulk.global.shared::cta.bulk_group"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _,"
COMMIT = "@%p1 cp.async.bulk.commit_group;"
FENCE = "fence.proxy.async.shared::cta;"


def wait(barrier: str, parity: int, name: str) -> str:
    return f"""$L_{name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [{barrier}], {parity};
    @!%p2 bra $L_{name};
    """


# The previous launch fills the first half of the words with their indices. A copy then fetches them, and lanes write
# them plus 100 to the second half.
LOAD = f"""{HEAD}{MAKE}
{EXPECT} [%r2], {BYTES};
{IN} [%r4], [%rd1], {BYTES}, [%r2];
{wait("%r2", 0, "arrived")}
ld.shared.b64 %rd4, [%r7];
add.s64 %rd4, %rd4, 100;
st.global.b64 [%rd3+{BYTES}], %rd4;
"""
# Lanes write their indices, a copy moves them to global memory, and the last lane reads the result.
STORE = f"""{HEAD}
cvt.u64.u32 %rd4, %r1;
st.shared.b64 [%r7], %rd4;
{FENCE}
bar.sync 0;
{OUT} [%rd1], [%r4], {BYTES};
{COMMIT}
@%p1 cp.async.bulk.wait_group 0;
bar.sync 0;
ld.global.b64 %rd5, [%rd3];
add.s64 %rd5, %rd5, 100;
st.global.b64 [%rd3+{BYTES}], %rd5;
"""
# Move four parts of global memory through two slots; the copying lane waits until a slot has been read.
RING = f"""{HEAD}{MAKE}
@!%p1 bra $L_end;
{
    "".join(
        f'''
cp.async.bulk.wait_group.read 1;
{EXPECT} [{"%r2" if k % 2 == 0 else "%r3"}], 128;
{IN} [{"%r4" if k % 2 == 0 else "%r5"}], [%rd1+{128 * k}], 128, [{"%r2" if k % 2 == 0 else "%r3"}];
{wait("%r2" if k % 2 == 0 else "%r3", k // 2, f"part{k}")}
{OUT} [%rd1+{BYTES + 128 * k}], [{"%r4" if k % 2 == 0 else "%r5"}], 128;
{COMMIT}'''
        for k in range(4)
    )
}
cp.async.bulk.wait_group.read 0;
$L_end:
"""
# Lane 0 writes what a copy of lane 32 then reads; they synchronise through a word.
PASS_ON = f"""{HEAD}{MAKE}
setp.eq.u32 %p3, %r1, 32;
@%p3 bra $L_copy;
@!%p1 bra $L_end;
mov.u64 %rd4, 77;
st.global.b64 [%rd1], %rd4;
st.global.b64 [%rd1+8], %rd4;
st.release.gpu.b64 [%rd8], %rd4;
bra.uni $L_end;
$L_copy:
ld.acquire.gpu.b64 %rd5, [%rd8];
setp.eq.s64 %p4, %rd5, 0;
@%p4 bra $L_copy;
fence.proxy.async.global;
mbarrier.arrive.expect_tx.shared::cta.b64 %rd6, [%r2], 16;
{IN.partition(" ")[2]} [%r4], [%rd1], 16, [%r2];
{wait("%r2", 0, "arrived")}
ld.shared.b64 %rd4, [%r4+8];
st.global.b64 [%rd1+16], %rd4;
$L_end:
"""


def run_all(text: str, seeds: range = range(1, 9)) -> list[list[int]]:
    """Return the resulting words for each seed; each lane's word starts as its index."""
    fill = f"{HEAD}cvt.u64.u32 %rd4, %r1;\nst.global.b64 [%rd3], %rd4;"
    return [_run(text, seed, fill) for seed in seeds]


def _run(text: str, seed: int, fill: str | None = None) -> list[int]:
    return run(text, threads=THREADS, shared_bytes=16 + 2 * BYTES, num_bytes=2 * BYTES + 64, seed=seed, first=fill)


@pytest.mark.parametrize("program", [LOAD, STORE])
def test_copies(program: str) -> None:
    for words in isolated(run_all, program):
        assert words[: 2 * WORDS] == [*range(WORDS), *range(100, 100 + WORDS)]


def test_a_ring_of_two_slots() -> None:
    for words in isolated(run_all, RING):
        assert words[: 2 * WORDS] == [*range(WORDS), *range(WORDS)]


def test_what_another_lane_wrote_is_copied() -> None:
    for words in isolated(run_all, PASS_ON):
        assert words[:3] == [77, 77, 77]


def test_copies_arrive_in_any_order() -> None:
    """Copies complete in any order: over all seeds, the second arrives both before and after the first."""
    text = f"""{HEAD}{MAKE}
    @!%p1 bra $L_end;
    {EXPECT} [%r2], {BYTES};
    {IN} [%r4], [%rd1], {BYTES}, [%r2];
    {EXPECT} [%r3], {BYTES};
    {IN} [%r5], [%rd1], {BYTES}, [%r3];
    {wait("%r3", 0, "second")}
    mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r2], 0;
    selp.b64 %rd4, 1, 2, %p3;
    {wait("%r2", 0, "first")}
    st.global.b64 [%rd8], %rd4;
    $L_end:
    """
    seen = {words[2 * WORDS] for words in isolated(run_all, text, range(1, 25))}
    assert seen == {1, 2}


def test_lanes_of_a_warp_meet() -> None:
    """Each lane may read what the others wrote before a warp barrier; without the barrier that is a race."""
    text = f"""{HEAD}st.shared.b64 [%r7], %rd2;
    bar.warp.sync -1;
    xor.b32 %r8, %r6, 8;
    add.s32 %r8, %r8, %r4;
    ld.shared.b64 %rd4, [%r8];
    st.global.b64 [%rd3], %rd4;"""
    assert isolated(run_all, text, range(1, 2))[0][:WORDS] == [8 * (i ^ 1) for i in range(WORDS)]
    with pytest.raises(PtxFault, match="race on shared memory: nothing orders this"):
        isolated(run_all, text.replace("bar.warp.sync -1;", ""), range(1, 2))


# name -> program, text to replace, replacement, report.
WRONG: dict[str, tuple[str, str, str, str]] = {
    "read before the bytes are there": (
        LOAD,
        wait("%r2", 0, "arrived"),
        "",
        "race on shared memory: nothing orders this",
    ),
    "a barrier of lanes does not wait for copies": (
        LOAD,
        wait("%r2", 0, "arrived"),
        "bar.sync 0;",
        "nothing orders this read after the write",
    ),
    "a wait for the phase before": (LOAD, "[%r2], 0;", "[%r2], 1;", "race on shared memory: nothing orders this"),
    "fewer bytes told than come": (LOAD, f"[%r2], {BYTES};", f"[%r2], {BYTES - 16};", "more bytes arrive than"),
    "barrier not shown to copies": (LOAD, "fence.mbarrier_init.release.cluster;", "mov.u32 %r8, 0;", "no fence shows"),
    "barrier used before it is made": (LOAD, "bar.sync 0;", "", "race on shared memory: |no mbarrier: "),
    "bytes that nobody waits for": (
        LOAD,
        f"{wait('%r2', 0, 'arrived')}\nld.shared.b64 %rd4, [%r7];",
        "",
        "a block ends that has not waited for a bulk copy into it",
    ),
    "half a unit off": (LOAD, "[%rd1], ", "[%rd1+8], ", "misaligned: 512 bytes"),
    "out of its slot": (LOAD, "[%r4], [%rd1]", "[%r5+16], [%rd1]", "out of bounds: 512 bytes of shared memory"),
    "a size of no whole units": (LOAD, f"[%rd1], {BYTES},", f"[%rd1], {BYTES - 8},", "wrong size: "),
    "bytes that never come": (
        LOAD,
        "ld.shared.b64",
        f"{EXPECT} [%r2], 16;\nld.shared.b64",
        "has not waited for a bulk",
    ),
    "two arrivals for one": (LOAD, f"{IN} [%r4]", f"{EXPECT} [%r2], 0;\n{IN} [%r4]", "more arrivals than"),
    "lanes' writes not shown to copies": (STORE, FENCE, "", "no fence shows copies the write"),
    "only global writes are shown": (STORE, FENCE, "fence.proxy.async.global;", "no fence shows copies the write"),
    "no barrier before the copy": (STORE, f"{FENCE}\nbar.sync 0;", FENCE, "race on shared memory: nothing orders this"),
    "read before it is written": (
        STORE,
        "wait_group 0;",
        "wait_group.read 0;",
        "nothing orders this read after the write",
    ),
    "not committed": (STORE, COMMIT, "", "nothing orders this read after the write"),
    "nobody waits": (
        STORE,
        "@%p1 cp.async.bulk.wait_group 0;\nbar.sync 0;\nld.global.b64 %rd5, [%rd3];",
        "",
        "a lane ends that has not waited",
    ),
    "a slot written while it is read": (RING, "wait_group.read 1", "wait_group.read 2", "this write after the read of"),
    "a part not waited for": (RING, wait("%r3", 1, "part3"), "", "this read after the write"),
    "other lanes' global writes not shown": (
        PASS_ON,
        "fence.proxy.async.global;",
        "",
        "no fence shows copies the write",
    ),
    "shown before they are known": (
        PASS_ON,
        "fence.proxy.async.global;",
        FENCE,
        "no fence shows copies the write",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_reported(name: str) -> None:
    text, old, new, says = WRONG[name]
    assert old in text
    with pytest.raises(PtxFault, match=says):
        isolated(run_all, text.replace(old, new), range(1, 3))
