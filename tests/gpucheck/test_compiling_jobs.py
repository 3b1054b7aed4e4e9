"""Jobs that compile kernels: what they ask of the compiler, the code that they judge, and the text that they read."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.jit import Binary, Resources
from moe_rt.engine.gpu.launcher import RING_SOURCE
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM
from moe_rt.lab.check import compiling, kernel_code
from moe_rt.lab.check.code_limits import LIMITS, Limits, find_wrong
from moe_rt.lab.check.compiling import LARGEST, Job, may_keep, run_job
from moe_rt.lab.check.kernel_code import MachineCode, Orders, find_problems, read_machine_code, read_orders
from moe_rt.lab.check.steps import Check

NEEDS = Resources(registers=64, stack_bytes=0, spill_bytes=0, shared_bytes=8)
RECEIVE = "\t.section\t.text.combine_receive\n.text.combine_receive:\n/*0000*/ STL [R1], R4 ;\n"
OTHER = "\t.section\t.text.helper\n.text.helper:\n/*0000*/ EXIT ;\n"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what the compiler and the disassembler are asked for."""
    seen: list[Any] = []

    def compile_kernels(source: str, arch: str, defines: Any, **how: Any) -> Binary:
        seen.append((source, arch, defines, how))
        return Binary(b"cubin", {"combine_send": NEEDS, "combine_receive": NEEDS}, how["cache"], 1.5)

    def compile_ptx(*given: Any) -> str:
        seen.append(given)
        return ".visible .entry dispatch_send(.param .b64 p) { st.release.sys.b64 [%rd1],%rd2; }"

    def disassemble(tool: str, cubin: bytes) -> str:
        seen.append((tool, cubin))
        return RECEIVE + OTHER

    monkeypatch.setattr(compiling, "compile_kernels", compile_kernels)
    monkeypatch.setattr(compiling, "compile_ptx", compile_ptx)
    monkeypatch.setattr(compiling, "find_disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(compiling, "disassemble", disassemble)
    return seen


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(
    ("source", "library"),
    [(LARGEST.source, None), (compiling.NETWORK, NVSHMEM), (compiling.OVER_GIN[0], NCCL)],
)
def test_a_job_compiles_its_variant_for_its_gpu(asked: list[Any], source: str, library: Any, cache: bool) -> None:
    variant = replace(LARGEST, source=source)
    found = run_job(Job(variant, "sm_90a", cache=cache))
    assert asked == [
        (source, "sm_90a", variant.defines(), {"library": library, "cache": cache}),
        ("nvdisasm", b"cubin"),
    ]
    assert list(found["kernels"]) == ["combine_receive", "combine_send"], "in alphabetical order"
    assert found["kernels"]["combine_send"] == asdict(NEEDS)
    assert (found["from_cache"], found["seconds"]) == (cache, 1.5)
    assert list(found["code"]) == ["combine_receive"], "a function outside of the kernels has no limits"
    assert found["code"]["combine_receive"] == asdict(read_machine_code(RECEIVE)["combine_receive"])


def test_a_job_for_ptx(asked: list[Any]) -> None:
    found = run_job(Job(LARGEST, "sm_80", to_ptx=True))
    assert asked == [("kernels.cu", "sm_80", LARGEST.defines())]
    orders = {"dispatch_send": Orders(0, 0, 1, 0, 0)}
    assert found == {"orders": {name: asdict(o) for name, o in orders.items()}, "problems": find_problems(orders)}


@pytest.mark.parametrize(
    ("variant", "arch", "judged"),
    [
        (LARGEST, "sm_90a", True),
        (replace(LARGEST, topk=9), "sm_90a", False),
        (replace(LARGEST, hidden=2048), "sm_90a", True),
        (LARGEST, "sm_103a", False),
        (replace(LARGEST, source=compiling.NODES), "sm_90a", False),
    ],
    ids=["limits", "may spill", "no limits but local memory", "an unknown GPU", "functions with stacks"],
)
def test_code_that_is_judged(asked: list[Any], variant: Any, arch: str, judged: bool) -> None:
    found = run_job(Job(variant, arch))
    codes = {"combine_receive": read_machine_code(RECEIVE)["combine_receive"]}
    assert found["wrong"] == (find_wrong(codes, variant.limits(arch)) if judged else [])
    assert ("combine_receive: got 1 accesses to local memory, expected none" in found["wrong"]) == judged


def test_jobs_without_a_disassembler_or_with_an_error(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_disassembler", lambda: None)
    assert run_job(Job(LARGEST, "sm_90a")).keys() == {"kernels", "from_cache", "seconds"}
    monkeypatch.setattr(compiling, "compile_kernels", lambda *given, **how: 1 / 0)
    (error,) = run_job(Job(LARGEST, "sm_90a")).values()
    assert error.endswith("ZeroDivisionError: division by zero\n")


def test_spills_that_are_known() -> None:
    """NCCL's functions may spill, and so may kernels whose limit has accesses to local memory."""
    coded = replace(LARGEST, codec=Codec.FP8)
    assert may_keep(Job(compiling.GIN_VARIANTS[0], "sm_90a"), "dispatch_send")
    known = {name for name, limit in LIMITS["sm_120a"][Codec.FP8].items() if limit.local}
    for name in LIMITS["sm_120a"][Codec.FP8]:
        own = name in coded.limits("sm_120a")
        assert may_keep(Job(coded, "sm_120a"), name) is (own and name in known)
        assert may_keep(Job(coded, "sm_90a"), name) is False
    assert may_keep(Job(LARGEST, "sm_90a"), "helper") is False


def test_the_step_compiles_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants and the variants of other steps go to the cache."""
    seen: list[Any] = []
    monkeypatch.setattr(compiling, "compile_all", lambda *given, **how: seen.append((given, how)))
    monkeypatch.setattr(compiling, "Gpu", lambda name: SimpleNamespace(arch=f"arch of {name}"))
    every = (*compiling.VARIANTS, *compiling.NEEDED)
    for device, arch in (("cuda:1", "arch of cuda:1"), (SimpleNamespace(arch="sm_80"), "sm_80")):
        check = Check(device)
        compiling.check(check)
        assert seen.pop() == (((arch,), every, check), {"cache": True})


def test_jobs_run_here_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single job, or a single core, needs no other process; else there are as many as cores, or as jobs."""
    made: list[int] = []

    class Pool:
        def __init__(self, processes: int, *given: Any) -> None:
            made.append(processes)

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        def imap(self, run: Any, jobs: list[Job]) -> Any:
            left = map(run, jobs)
            return SimpleNamespace(next=lambda seconds: next(left))

    preloaded: list[list[str]] = []
    context = SimpleNamespace(Pool=Pool, set_forkserver_preload=preloaded.append)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: {"forkserver": context}[method])
    monkeypatch.setattr(compiling, "run_job", lambda job: {"kernels": job.arch})
    for cores, count, processes in ((1, 3, []), (8, 1, []), (8, 0, []), (2, 2, [2]), (8, 3, [3]), (2, 3, [2])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: {0: range(n)}[pid])
        jobs = [Job(LARGEST, f"sm_{n}") for n in range(count)]
        assert list(compiling._results(jobs, 60.0)) == [(job, {"kernels": job.arch}) for job in jobs]
        assert made == processes
        made.clear()
    assert preloaded == [["moe_rt.lab.check.compiling"]] * 3


def test_variants_have_limits_of_the_kernels_that_they_define() -> None:
    """Each kernel that has limits is defined by one source."""
    names = [set(replace(LARGEST, source=s).limits("sm_90a")) for s in (LARGEST.source, compiling.WHOLE,
             compiling.REHEARSED)]  # fmt: skip
    assert set().union(*names) == set(LIMITS["sm_90a"][Codec.RAW])
    assert sum(map(len, names)) == len(LIMITS["sm_90a"][Codec.RAW])
    assert set(replace(LARGEST, source=RING_SOURCE).limits("sm_90a")) == names[0]


LOADS = {  # an access, and its bytes per lane; 0 if it is not to memory that peers can read
    "ld.global.u8": 1, "ld.b16": 2, "ld.volatile.global.s32": 4, "ld.relaxed.sys.f64": 8, "ld.v2.f32": 8,
    "ld.v4.u16": 8, "ld.global.v2.b64": 16, "ld.global.nc.L1::no_allocate.v4.f32": 16, "ld.v4.b64": 32,
    "ld.global.v8.b32": 32, "ld.shared.v4.u32": 0, "ld.shared::cluster.v4.u32": 0, "ld.local.v4.u32": 0,
    "ld.param.b128": 0, "ld.const.v4.u32": 0, "ld.global.b128": 16, "ld.global.pred": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["ld", "st"])
def test_wide_accesses_of_ptx(kind: str) -> None:
    """An access is wide from 16 bytes on."""
    for load, num_bytes in LOADS.items():
        line = f"{kind}{load[2:]} %r1, [%rd1];"
        orders = read_orders(f".entry one(.param .b64 p) {{\n {line}\n}}\n.entry two(.param .b64 p) {{ ret; }}")
        wide = int(num_bytes >= 16)
        found = orders["one"].wide_loads, orders["one"].wide_stores
        assert found == ((wide, 0) if kind == "ld" else (0, wide)), line
        assert orders["two"] == Orders(0, 0, 0, 0, 0)


def test_orders_of_ptx_are_counted() -> None:
    """Only those of an entry count, not those of functions after it; weaker orders do not."""
    strong = {"releases": "st.release.sys.b64", "acquires": "ld.acquire.sys.b64",
              "last_block": "atom.global.add.acq_rel.gpu.u32"}  # fmt: skip
    weak = "st.release.gpu.b64 ld.acquire.gpu.b64 atom.add.relaxed.gpu.u32 st.relaxed.sys.b64"
    for count in (1, 2, 3):
        for name, word in strong.items():
            text = f".entry one() {{ {f'{word} x; ' * count}{weak} }}\n.func f() {{ {word} x; }}"
            assert asdict(read_orders(text)["one"]) == {
                "wide_loads": 0, "wide_stores": 0, "releases": 0, "acquires": 0, "last_block": 0, name: count,
            }  # fmt: skip


def test_orders_that_a_kernel_lacks() -> None:
    sends, receives = ("dispatch_send", "combine_send", "combine_backward_send"), (
        "dispatch_receive", "combine_receive", "combine_backward_receive")  # fmt: skip
    orders = dict.fromkeys((*sends, *receives), Orders(1, 1, 1, 1, 1))
    assert find_problems(orders) == []
    assert find_problems({}) == [f"got no kernel {name}" for name in (*sends, *receives)]
    wide = ("dispatch_receive", "combine_send", "combine_receive")
    lacking = {
        "wide_loads": ("loads of 16 bytes", wide),
        "wide_stores": ("stores of 16 bytes", wide),
        "releases": ("st.release.sys, which announces", sends),
        "last_block": ("an atom of acq_rel.gpu, which counts blocks", sends),
        "acquires": ("ld.acquire.sys, which waits", receives),
    }
    for field, (what, names) in lacking.items():
        few = {name: replace(o, **{field: 0}) for name, o in orders.items()}
        assert find_problems(few) == [f"{name}: got no {what}" for name in names]


WIDTHS = {"LDG.E.U8": 1, "LDG.E.S8": 1, "LD.E.U16": 2, "LDG.E": 4, "LDG.E.64": 8, "LDG.E.128.CONSTANT": 16,
          "LDG.E.ENL2.256": 32}  # fmt: skip


@pytest.mark.parametrize("opcode", WIDTHS)
def test_registers_that_a_load_fills(opcode: str) -> None:
    """A run of loads ends at the first instruction that uses one of them, and only of them."""
    width = WIDTHS[opcode]
    registers = max(1, width // 4)
    first = f"/*0000*/ {opcode} R40, [R2.64] ;\n"
    last = f"/*0020*/ {opcode} R80, [R2.64] ;\n"
    for register in range(38, 40 + registers + 2):
        code = read_machine_code(f".text.k:\n{first}/*0010*/ FADD R20, R21, R{register} ;\n{last}")["k"]
        inside = 40 <= register < 40 + registers
        assert code.loads == {width: 2}
        assert code.ahead == {width: 1 if inside else 2}
        overwritten = read_machine_code(f".text.k:\n{first}/*0010*/ {opcode} R{register}, [R2.64] ;\n{last}")["k"]
        assert overwritten.ahead == {width: 3}, "a load's own result is no use of it"
    store = read_machine_code(f".text.k:\n/*0000*/ {opcode.replace('LD', 'ST')} [R2.64], R4 ;\n")["k"]
    assert (store.stores, store.loads) == ({width: 1}, {})


@pytest.mark.parametrize(
    ("jump", "ends"),
    [("BRA `(.L_1)", True), ("EXIT", True), ("RET.REL.NODEC R20", True), ("BRX R20 -0x10", True), ("JMP 0x10", True),
     ("BAR.SYNC 0x0", True), ("@P1 BRA `(.L_1)", False), ("@!P1 EXIT", False), ("BRA.U !UP0, `(.L_1)", False),
     ("BRA P3, `(.L_1)", False), ("BRA.DIV UR4, `(.L_1)", False), ("NOP", False), ("@P0 BAR.SYNC 0x0", False)],
)  # fmt: skip
def test_jumps_that_end_a_run_of_loads(jump: str, ends: bool) -> None:
    load = "/*0000*/ LDG.E.128 R{}, [R2.64] ;\n"
    code = read_machine_code(f".text.k:\n{load.format(8)}/*0010*/ {jump} ;\n{load.format(12)}{load.format(16)}")["k"]
    assert code.ahead == {16: 2 if ends else 3}
    assert code.instructions == 4


def test_instructions_are_counted_by_kind() -> None:
    lines = ["LDL R4, [R1]", "STL.64 [R1], R4", "BAR.SYNC.DEFER_BLOCKING 0x0", "BAR.ARV 0x0", "MEMBAR.SC.SYS",
             "MEMBAR.SC.SYS", "FENCE.VIEW.ASYNC.S", "UBLKCP.S.G [UR4], [UR6], UR8", "UBLKCP.S.G [UR4], [UR6], UR8",
             "LDS.128 R4, [R9]", "STS [R9], R4", "LDC R1, c[0x0][0x28]", "LDG.E.64 R4, [R2.64]",
             "LDG.E.64 R6, [R2.64]", "STG.E.U16 [R2.64], R30", "STG.E.U16 [R2.64], R30"]  # fmt: skip
    text = "".join(f"/*{16 * n:04x}*/ {line} ;\n" for n, line in enumerate(lines))
    found = read_machine_code(f".text.one:\n{text}\t.section .text.two\n.text.two:\n{text[:60]}")
    assert found["one"] == MachineCode(
        loads={8: 2}, stores={2: 2}, ahead={8: 2}, local=2, barriers=1,
        fences={"MEMBAR.SC.SYS": 2, "FENCE.VIEW.ASYNC.S": 1}, copies={"UBLKCP.S.G": 2}, instructions=len(lines),
    )  # fmt: skip
    assert found["two"].instructions == 2


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_limits_hold_at_their_bounds(extra: int) -> None:
    """Each limit is met exactly; one less or more is reported with what was got and expected."""
    limits = Limits((16, 4), narrow=3, system_fences=2, barriers=5, store=8, device_fences=1, local=6, copies=2)
    view = "FENCE.VIEW.ASYNC.G"
    least: dict[str, Any] = {
        "ahead": ({16: 4 + extra}, f"got {4 + extra} loads of 16 bytes before the first use, expected 4 at least"),
        "copies": ({"UBLKCP.S.G": 2 + extra, "UBLKCP.G.S": 2}, f"got {2 + extra} bulk copies UBLKCP.S.G, expected 2 at "
                   "least"),
    }  # fmt: skip
    most: dict[str, Any] = {
        "local": (6 + extra, f"got {6 + extra} accesses to local memory, expected 6"),
        "barriers": (5 + extra, f"got {5 + extra} barriers, expected 5 at most"),
        "loads": ({1: 1, 2: 1 + extra, 4: 9}, f"got {3 + extra} accesses of one or two bytes, expected 3 at most"),
    }
    right = MachineCode(
        loads={1: 1, 2: 1, 4: 9}, stores={8: 1, 1: 1}, ahead={16: 4}, local=6, barriers=5,
        fences={"MEMBAR.SC.SYS": 2, "MEMBAR.ALL.GPU": 1, view: 2}, copies={"UBLKCP.S.G": 2, "UBLKCP.G.S": 2},
        instructions=99,
    )  # fmt: skip
    for fields, sign in ((least, -1), (most, 1)):
        for name, (value, said) in fields.items():
            wrong = find_wrong({"k": replace(right, **{name: value})}, {"k": limits})
            assert wrong == ([f"k: {said}"] if extra == sign else []), name
    for kind, of, expected in (("MEMBAR.SC.SYS", "system", 2), ("MEMBAR.ALL.GPU", "device", 1)):
        fences = {**right.fences, kind: expected + extra}
        said = f"k: got {expected + extra} fences of the {of}, expected {expected} at most"
        assert find_wrong({"k": replace(right, fences=fences)}, {"k": limits}) == ([said] if extra == 1 else [])
    shown = {**right.fences, view: 2 + extra}
    said = f"k: got {2 + extra} fences {view}, expected 2 at least"
    assert find_wrong({"k": replace(right, fences=shown)}, {"k": limits}) == ([said] if extra == -1 else [])
    for width, fine in ((4, False), (8, True), (16, True)):
        wrong = [] if fine else [f"k: got stores of at most {width} bytes, expected 8"]
        assert find_wrong({"k": replace(right, stores={width: 1, 2: 1}, loads={1: 1})}, {"k": limits}) == wrong


def test_local_memory_of_a_kernel_without_limits() -> None:
    code = read_machine_code(OTHER + RECEIVE)
    assert find_wrong(code, {}) == ["combine_receive: got 1 accesses to local memory, expected none"]


def tool_in(directory: Path, script: str) -> str:
    tool = directory / "nvdisasm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


def test_the_disassembler_reads_a_file(tmp_path: Path) -> None:
    tool = tool_in(tmp_path, 'echo "$1 of"; case $2 in *.cubin) cat "$2";; esac')
    assert kernel_code.disassemble(tool, b"code\n") == "--print-code of\ncode\n"
    failing = tool_in(tmp_path, "echo ' bad cubin ' >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"nvdisasm: got exit status 3, expected 0: bad cubin$"):
        kernel_code.disassemble(failing, b"code")


def test_where_the_disassembler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for on PATH first, then in a package."""
    found, imported = tool_in(tmp_path, ""), builtins.__import__

    def without(name: str, *given: Any) -> Any:
        if name == "cuda.pathfinder":
            raise ImportError(name)
        return imported(name, *given)

    packages = ModuleType("cuda.pathfinder")
    packages.find_nvidia_binary_utility = lambda name: f"package/{name}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", packages)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_code.find_disassembler() == found
    monkeypatch.setenv("PATH", "")
    assert kernel_code.find_disassembler() == "package/nvdisasm"
    monkeypatch.setattr(builtins, "__import__", without)
    assert kernel_code.find_disassembler() is None


def test_memory_orders_are_read_for_every_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []

    def results(jobs: list[Job], seconds: float) -> Iterator[Any]:
        asked.extend(jobs)
        return iter([])

    monkeypatch.setattr(compiling, "_results", results)
    compiling.compile_all(("sm_80", "sm_90a"), (LARGEST,), Check("cpu"), cache=False)
    assert asked == [Job(LARGEST, arch, to_ptx=to_ptx) for to_ptx in (False, True) for arch in ("sm_80", "sm_90a")]
