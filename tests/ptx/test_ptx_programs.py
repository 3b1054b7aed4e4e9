"""The tool itself: results of instructions, what it refuses, and its reports of wrong programs."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from ptx import programs
from ptx.gpu import PtxFault
from ptx.own_process import isolated
from ptx.parse import TranslationError, parse
from ptx.programs import program, run
from ptx.translate import translate

TID = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 8;\nadd.s64 %rd3, %rd1, %rd2;\n"
ALL = (1 << 64) - 1


def of_float(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


# Instructions that leave their result in %rd9 -> the result by the definition of PTX.
ARITHMETIC: dict[str, int] = {
    "mov.b64 %rd4, 5;\nshl.b64 %rd9, %rd4, 64;": 0,
    "mov.b64 %rd4, -8;\nshr.s64 %rd9, %rd4, 99;": ALL,
    "mov.b64 %rd4, -8;\nshr.u64 %rd9, %rd4, 60;": 15,
    "mov.b32 %r4, -2;\nmul.wide.s32 %rd9, %r4, 3;": ALL - 5,
    "mov.b32 %r4, -2;\nmul.wide.u32 %rd9, %r4, 3;": 3 * (2**32 - 2),
    "mov.b32 %r4, -2;\nmul.hi.s32 %r5, %r4, 3;\ncvt.s64.s32 %rd9, %r5;": ALL,
    "mov.b32 %r4, -2;\nmul.hi.u32 %r5, %r4, 3;\ncvt.s64.s32 %rd9, %r5;": 2,
    "mov.b32 %r4, -7;\nmov.b32 %r5, 2;\ncvt.s64.s32 %rd4, %r4;\nrem.s64 %rd9, %rd4, 2;": ALL,
    "mov.b32 %r4, 0x04030201;\nmov.b32 %r5, 0x08070685;\nprmt.b32 %r6, %r4, %r5, 0xC740;\ncvt.u64.u32 %rd9, %r6;": (
        0xFF088501
    ),
    "mov.b64 %rd4, 0xAB;\nmov.b64 %rd5, -1;\nbfi.b64 %rd9, %rd4, %rd5, 8, 8;": ALL - 0x5400,
    "mov.b32 %r4, 0xF0F1;\npopc.b32 %r5, %r4;\ncvt.u64.u32 %rd9, %r5;": 9,
    "mov.f32 %f1, 0f7FC00000;\ncvt.rzi.s32.f32 %r4, %f1;\ncvt.s64.s32 %rd9, %r4;": 0,
    "mov.f32 %f1, 0fCF800000;\ncvt.rzi.s32.f32 %r4, %f1;\ncvt.s64.s32 %rd9, %r4;": ALL - 2**31 + 1,
    "mov.f32 %f1, 0f3F800001;\nmov.f32 %f2, 0f33800000;\nfma.rm.f32 %f3, %f1, %f1, %f2;\nmov.b32 %r4, %f3;\n"
    "cvt.u64.u32 %rd9, %r4;": 0x3F800002,
    "mov.f32 %f1, 0f3F804000;\ncvt.rn.bf16.f32 %rs1, %f1;\ncvt.u64.u16 %rd9, %rs1;": 0x3F80,
    "mov.f32 %f1, 0f3F80C000;\ncvt.rn.bf16.f32 %rs1, %f1;\ncvt.u64.u16 %rd9, %rs1;": 0x3F81,
    "mov.f32 %f1, 0f477FF000;\ncvt.rn.f16.f32 %rs1, %f1;\ncvt.u64.u16 %rd9, %rs1;": 0x7C00,
    **{
        f"mov.f32 %f1, {high};\nmov.f32 %f2, {low};\ncvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;\n"
        "cvt.u64.u16 %rd9, %rs1;": codes
        for high, low, codes in (
            ("0f43E80000", "0fC3E80001", 0x7EFE),  # 464 and the next below -464: beyond the largest
            ("0f7FC00000", "0f7F800000", 0x7F7E),  # NaN, infinity
            ("0f3F880000", "0f3F980000", 0x383A),  # 1.0625 and 1.1875, midpoints of two codes: to even
            ("0f3F880001", "0fBF87FFFF", 0x39B8),
            ("0f3A800000", "0f3A800001", 0x0001),  # half of the smallest code, and a little more
            ("0f3C700000", "0f80000000", 0x0880),  # rounds up to the smallest normal number; a negative zero stays
        )
    },
    "mov.f32 %f1, 0f40400000;\nex2.approx.ftz.f32 %f2, %f1;\nmov.b32 %r4, %f2;\ncvt.u64.u32 %rd9, %r4;": of_float(8.0),
    "mov.f32 %f1, 0f7FC00000;\nsetp.ltu.f32 %p1, %f1, 0f00000000;\nselp.b64 %rd9, 1, 0, %p1;": 1,
    "mov.f32 %f1, 0f7FC00000;\nsetp.ne.f32 %p1, %f1, 0f00000000;\nselp.b64 %rd9, 1, 0, %p1;": 0,
    "mov.b32 %r4, -1;\nsetp.lt.u32 %p1, %r4, 5;\nselp.b64 %rd9, 1, 0, %p1;": 0,
    "mov.b16 %rs1, 1;\nmov.b16 %rs2, 2;\nmov.b32 %r4, {%rs1, %rs2};\ncvt.u64.u32 %rd9, %r4;": 0x20001,
    "mov.b64 %rd4, -1;\nst.global.u8 [%rd1+1016], %rd4;\nld.global.s8 %r4, [%rd1+1016];\ncvt.s64.s32 %rd9, %r4;": ALL,
}


def test_arithmetic() -> None:
    got = isolated(programs.results, list(ARITHMETIC))
    assert {text: value & ALL for text, value in zip(ARITHMETIC, got, strict=False)} == ARITHMETIC


def test_lanes_exchange_values() -> None:
    """A shuffle gives each of 64 lanes its neighbour's index, and a reduction gives the maximum of its warp."""
    text = f"""{TID}shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1;
    redux.sync.max.u32 %r3, %r1, -1;
    mad.lo.s32 %r4, %r3, 1000, %r2;
    cvt.u64.u32 %rd4, %r4;
    st.global.b64 [%rd3], %rd4;"""
    assert isolated(_sixty_four, text) == [1000 * (i // 32 * 32 + 31) + (i ^ 1) for i in range(64)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("idx.b32 %r2|%p1, %r1, 5, 31", lambda i: (i // 32 * 32 + 5, 1)),
        ("idx.b32 %r2|%p1, %r1, 5, 6175", lambda i: (i // 8 * 8 + 5, 1)),  # segments of eight lanes
        ("up.b32 %r2|%p1, %r1, 3, 0", lambda i: (i - 3, 1) if i % 32 >= 3 else (i, 0)),
        ("up.b32 %r2|%p1, %r1, 3, 6144", lambda i: (i - 3, 1) if i % 8 >= 3 else (i, 0)),
    ],
)
def test_lanes_take_the_value_of_a_lane(how: str, expected: Callable[[int], tuple[int, int]]) -> None:
    """A lane that would be taken from outside the segment leaves the own value, and the predicate false."""
    text = f"""{TID}shfl.sync.{how}, -1;
    selp.b32 %r3, 1, 0, %p1;
    mad.lo.s32 %r4, %r3, 1000, %r2;
    cvt.u64.u32 %rd4, %r4;
    st.global.b64 [%rd3], %rd4;"""
    assert isolated(_sixty_four, text) == [value + 1000 * valid for value, valid in map(expected, range(64))]


def _sixty_four(text: str) -> list[int]:
    return run(text, threads=64, num_bytes=512)


@pytest.mark.parametrize(
    "text",
    [
        "add.cc.s32 %r1, %r2, %r3;",
        "ld.global.nc.u32 %r1, [%rd1];",
        "ld.acquire.cta.u32 %r1, [%rd1];",
        "fence.acq_rel.cta;",
        "mul.rz.f32 %f1, %f2, %f3;",
        "shfl.sync.down.b32 %r1, %r2, 1, 31, -1;",
        "call.uni somewhere, ();",
        "bar.sync 1;",
        "mov.u32 %r1, %laneid;",
        "st.global.u32 [elsewhere], %r1;",
    ],
)
def test_what_is_not_known_is_refused(text: str) -> None:
    """Unknown PTX is refused with its line; the tool does not guess."""
    (entry,) = parse(program(text))
    with pytest.raises(TranslationError, match=r"small, line \d+ \(.*\): got "):
        translate(entry)


WRONG: dict[str, tuple[str, str]] = {
    "half of a block at a barrier": (
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:",
        "barrier divergence",
    ),
    "two barriers": (
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L_else;\nbar.sync 0;\nbra.uni $L_end;\n$L_else:\nbar.sync 0;\n$L_end:",
        "barrier divergence: other lanes wait at another barrier",
    ),
    "a mask without this lane": ("redux.sync.max.u32 %r3, %r1, 1;", "wrong mask: it does not name this lane"),
    "a mask of lanes that are elsewhere": (
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L_end;\nredux.sync.max.u32 %r3, %r1, -1;\n$L_end:",
        "wrong mask",
    ),
    "a barrier in one warp's collective": (
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L_else;\nbar.sync 0;\n$L_else:\nredux.sync.max.u32 %r3, %r1, -1;",
        "deadlock",
    ),
    "all lanes write one word": ("st.global.b64 [%rd1], %rd2;", "race on global memory"),
    "a neighbour reads shared memory": (
        "st.shared.u32 [room], %r1;\nld.shared.u32 %r4, [room];",
        "race on shared memory",
    ),
    "behind the memory": ("st.global.b64 [%rd3+1024], %rd2;", "out of bounds: 8 bytes of global memory"),
    "before the memory": ("ld.global.b64 %rd4, [%rd1+-8];", "out of bounds"),
    "behind shared memory": ("st.shared.u32 [room+16], %r1;", "out of bounds: 4 bytes of shared memory"),
    "behind the parameters": ("ld.param.u64 %rd4, [small_param_0+8];", "out of bounds: 8 bytes of parameter memory"),
    "half a word off": ("ld.global.b64 %rd4, [%rd1+4];", "misaligned: 8 bytes"),
    "shared memory as global": ("mov.u64 %rd4, 0;\nld.global.b64 %rd5, [%rd4];", "out of bounds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_reported(name: str) -> None:
    text, says = WRONG[name]
    with pytest.raises(PtxFault) as raised:
        isolated(_wrong, TID + text)
    report = str(raised.value)
    assert report.startswith(says), report
    assert "at small, block 0, lane " in report


def _wrong(text: str) -> None:
    run(text, threads=32, shared_bytes=16)


def test_what_a_release_orders_is_no_race() -> None:
    """Lane 32 waits for lane 0's word and reads its write: no race with a release, a race with a relaxed word."""
    text = f"""{TID}setp.eq.u32 %p1, %r1, 0;
    @%p1 bra $L_write;
    setp.ne.u32 %p2, %r1, 32;
    @%p2 bra $L_end;
    $L_wait:
    ld.acquire.gpu.b64 %rd4, [%rd1+8];
    setp.eq.s64 %p3, %rd4, 0;
    @%p3 bra $L_wait;
    ld.global.b64 %rd5, [%rd1];
    st.global.b64 [%rd1+16], %rd5;
    bra.uni $L_end;
    $L_write:
    mov.u64 %rd6, 77;
    st.global.b64 [%rd1], %rd6;
    st.release.gpu.b64 [%rd1+8], %rd6;
    $L_end:"""
    assert isolated(_sixty_four, text)[:3] == [77, 77, 77]
    with pytest.raises(PtxFault, match="race on global memory"):
        isolated(_sixty_four, text.replace("st.release", "st.relaxed"))
    with pytest.raises(PtxFault, match="race on global memory"):
        isolated(_sixty_four, text.replace("ld.acquire", "ld.relaxed"))


def test_a_launch_of_too_many_threads_is_refused() -> None:
    assert "CUDA_ERROR_INVALID_VALUE" in isolated(programs.launch_error, "", 1025)
