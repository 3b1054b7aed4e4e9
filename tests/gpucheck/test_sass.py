"""Machine code is parsed correctly, on snippets with known counts, and the project's kernels meet their limits."""

from __future__ import annotations

import os

import pytest
from device.jit_tools import require_compiler
from gpucheck.estimates_tool import estimates_tool

from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.launcher import RING_KERNELS, RING_SOURCE
from moe_rt.lab.check import compiling
from moe_rt.lab.check.code_limits import FORWARD_KERNELS, LIMITS, Limits, find_wrong
from moe_rt.lab.check.compiling import LARGEST, compile_all
from moe_rt.lab.check.kernel_code import INSTALL, MachineCode, disassemble, find_disassembler, read_machine_code
from moe_rt.lab.check.steps import Check

HEAD = '\t.section\t.text.{0},"ax",@progbits\n.text.{0}:\n'
# Two loads are issued before R8 is needed; a third one waits for the first two; then one is used by the next line.
AHEAD = """        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.128.STRONG.SYS R8, desc[UR4][R2.64+0x200] ;
.L_x_1:
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   LD.E.128 R12, desc[UR4][R10.64] ;
        /*0050*/                   STG.E.128 desc[UR4][R16.64], R4 ;
        /*0060*/                   LDG.E.U8 R20, desc[UR4][R2.64] ;
        /*0070*/                   FADD R4, R20, R21 ;
        /*0080*/                   EXIT ;
"""


def of(body: str, name: str = "small") -> MachineCode:
    return read_machine_code(HEAD.format(name) + body)[name]


def test_widths_and_loads_ahead() -> None:
    code = of(AHEAD)
    assert code.loads == {16: 3, 1: 1}
    assert code.stores == {16: 1}
    assert code.ahead == {16: 2, 1: 1}, "the address of the third is brought by the second"
    assert code.instructions == 9
    assert (code.local, code.barriers, code.fences) == (0, 0, {})


def test_vectors_are_needed_as_soon_as_one_register_is() -> None:
    two = "/*0000*/ LDG.E.128 R4, [R2.64] ;\n/*0010*/ {} ;\n/*0020*/ LDG.E.128 R8, [R2.64] ;\n"
    assert of(two.format("FADD R20, R7, R21")).ahead == {16: 1}
    assert of(two.format("FADD R20, R22, R21")).ahead == {16: 2}
    assert of(two.format("BRA `(.L_x_3)")).ahead == {16: 1}
    assert of(two.format("@P0 BRA `(.L_x_3)")).ahead == {16: 2}
    assert of(two.format("BRA.U UP0, `(.L_x_3)")).ahead == {16: 2}
    assert of(two.format("BAR.SYNC.DEFER_BLOCKING 0x0")).ahead == {16: 1}


def test_orders_and_memory_of_lanes() -> None:
    code = of(
        "/*0000*/ MEMBAR.SC.SYS ;\n/*0010*/ MEMBAR.ALL.GPU ;\n/*0020*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;\n"
        "/*0030*/ STL.128 [R1], R4 ;\n/*0040*/ @P0 LDL R4, [R1+0x10] ;\n/*0050*/ MEMBAR.SC.SYS ;\n"
        "/*0060*/ LDS.128 R4, [R9] ;\n/*0070*/ ST.E.U16 desc[UR4][R2.64], R8 ;\n/*0080*/ LDG.E.64 R2, [R4.64] ;\n"
    )
    assert code.fences == {"MEMBAR.SC.SYS": 2, "MEMBAR.ALL.GPU": 1}
    assert (code.local, code.barriers) == (2, 1)
    assert (code.loads, code.stores) == ({8: 1}, {2: 1})


def test_bulk_copies() -> None:
    """Bulk copies are counted by direction; kernels that need them must have a fence that shows them global memory."""
    text = "/*0000*/ UBLKCP.S.G [UR4], [UR6], UR8 ;\n/*0010*/ @P0 UBLKCP.G.S [UR6], [UR4], UR8 ;\n{}"
    without, within = of(text.format("")), of(text.format("/*0020*/ FENCE.VIEW.ASYNC.G ;\n"))
    assert without.copies == {"UBLKCP.S.G": 1, "UBLKCP.G.S": 1}
    limits = {"small": Limits((16, 0), narrow=0, system_fences=0, barriers=0, store=0, copies=1)}
    assert find_wrong({"small": within}, limits) == []
    assert find_wrong({"small": without}, limits) == ["small: got 0 fences FENCE.VIEW.ASYNC.G, expected 1 at least"]
    assert find_wrong({"small": of("/*0000*/ FENCE.VIEW.ASYNC.G ;\n")}, limits) == [
        "small: got 0 bulk copies UBLKCP.S.G, expected 1 at least",
        "small: got 0 bulk copies UBLKCP.G.S, expected 1 at least",
    ]


def test_kernels_are_distinguished() -> None:
    text = HEAD.format("first") + AHEAD + HEAD.format("second") + "/*0000*/ EXIT ;\n"
    found = read_machine_code(text)
    assert {name: code.instructions for name, code in found.items()} == {"first": 9, "second": 1}


def test_limits_are_compared() -> None:
    limits = {"small": Limits((16, 3), narrow=0, system_fences=0, barriers=0)}
    assert find_wrong({"small": of(AHEAD)}, limits) == [
        "small: got 2 loads of 16 bytes before the first use, expected 3 at least",
        "small: got 1 accesses of one or two bytes, expected 0 at most",
    ]
    fences = "/*0000*/ STL [R1], R4 ;\n/*0010*/ MEMBAR.SC.SYS ;\n/*0020*/ BAR.SYNC 0x0 ;\n"
    assert find_wrong({"small": of(fences)}, limits) == [
        "small: got 1 accesses to local memory, expected none",
        "small: got 0 loads of 16 bytes before the first use, expected 3 at least",
        "small: got stores of at most 0 bytes, expected 16",
        "small: got 1 fences of the system, expected 0 at most",
        "small: got 1 barriers, expected 0 at most",
    ]
    kept = {"small": Limits((16, 0), narrow=0, system_fences=1, barriers=1, store=0, local=1)}
    assert find_wrong({"small": of(fences)}, kept) == []
    counts = "/*0000*/ MEMBAR.ALL.GPU ;\n/*0010*/ STL [R1], R4 ;\n/*0020*/ STL [R1], R4 ;\n"
    assert find_wrong({"small": of(counts)}, kept) == [
        "small: got 2 accesses to local memory, expected 1",
        "small: got 1 fences of the device, expected 0 at most",
    ]
    unlimited = {"small": Limits((16, 2), narrow=None, system_fences=None, barriers=1)}
    assert find_wrong({"small": of(AHEAD)}, unlimited) == []
    assert find_wrong({}, limits) == ["small: got no such kernel"]


def require_disassembler() -> str:
    require_compiler()
    if tool := find_disassembler():
        return tool
    if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
        pytest.fail(INSTALL)
    pytest.skip(INSTALL)


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"nvdisasm: got exit status \d+"):
        disassemble(require_disassembler(), b"no cubin")


LIMITED = tuple(v for v in compiling.VARIANTS if v.limited())


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", LIMITS)
def test_kernels_are_as_expected(arch: str) -> None:
    require_disassembler()
    assert [v.codec for v in LIMITED if v.source == "kernels.cu"] == list(LIMITS[arch])
    for source in (compiling.WHOLE, compiling.REHEARSED):
        assert [v.codec for v in LIMITED if v.source == source] == [Codec.RAW, Codec.FP8]
    check = Check(None, seconds=1700)
    compile_all((arch,), LIMITED, check, cache=True)
    assert check.failures == []
    (table,) = (table for table in check.tables if table.title == "Machine code")
    limited = {name for v in LIMITED if v.is_for(arch) for name in v.limits(arch)}
    assert {row[5] for row in table.rows} >= limited > {"dispatch_send", "dispatch_whole"}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.FP8], ids=lambda codec: codec.name)
def test_estimates_are_those_of_the_kernels(codec: Codec) -> None:
    """The limits in the estimates equal the machine code, neither more nor less."""
    require_disassembler()
    module = estimates_tool()
    codes = module.read_kernels(codec)
    estimated = LIMITS[module.ARCH][codec].keys() - FORWARD_KERNELS
    loads = {name: LIMITS[module.ARCH][codec][name].load for name in estimated}
    assert {name: codes[name].ahead[width] for name, (width, _) in loads.items()} == {
        name: ahead for name, (_, ahead) in loads.items()
    }


def test_limits_are_those_of_the_gpu() -> None:
    hopper, blackwell = (LARGEST.limits(arch)["combine_send"] for arch in ("sm_90a", "sm_100a"))
    assert (hopper.system_fences, blackwell.system_fences) == (1, 5)
    coded = next(v for v in LIMITED if v.codec is Codec.FP8 and v.source == LARGEST.source)
    assert [coded.limits(arch)["dispatch_receive"].local for arch in LIMITS] == [0, 0, 0, 10]
    assert LARGEST.limits("sm_103a") == {}, "which nobody has looked at"
    (ringed,) = (v for v in LIMITED if v.source == RING_SOURCE)
    assert {name for name, of in ringed.limits("sm_100a").items() if of.copies} == set(RING_KERNELS)
    assert [ringed.is_for(arch) for arch in LIMITS] == [False, True, True, True]


def test_the_gate_fails_where_a_kernel_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    require_disassembler()
    strict = Limits((16, 9), narrow=0, system_fences=1, barriers=6, device_fences=1)
    monkeypatch.setitem(LIMITS["sm_90a"], Codec.RAW, LIMITS["sm_90a"][Codec.RAW] | {"combine_send": strict})
    result = compiling.run_job(compiling.Job(LARGEST, "sm_90a", cache=True))
    assert result["wrong"] == ["combine_send: got 8 loads of 16 bytes before the first use, expected 9 at least"]
