"""Compile every kernel variant for given architectures on all cores; report their resources and check their code."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from moe_rt.config.codec import Codec
from moe_rt.config.options import Sums
from moe_rt.config.tuning import ACTIVATION_THREADS, Tuning
from moe_rt.engine.gpu.driver import Gpu, has_bulk_copies
from moe_rt.engine.gpu.jit import Binary, compile_kernels, compile_ptx, source_dir
from moe_rt.engine.gpu.launcher import RING_SOURCE, SUMS_ENUMERATORS
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM, Library
from moe_rt.engine.gpu.nvrtc import find_toolkit
from moe_rt.errors import CompileError
from moe_rt.lab.check.code_limits import FORWARD_KERNELS, LIMITS, RING_LIMITS, WHOLE_KERNELS, Limits, find_wrong
from moe_rt.lab.check.kernel_code import (
    INSTALL,
    MachineCode,
    Orders,
    disassemble,
    find_disassembler,
    find_problems,
    read_machine_code,
    read_orders,
)
from moe_rt.lab.check.steps import Check, Table

NO_SPILLS_UP_TO_TOPK = 8
NETWORK, WHOLE = "kernels_rdma.cu", "kernels_whole.cu"
NODES, REHEARSED = "kernels_nodes.cu", "kernels_nodes_mapped.cu"
OVER_NETWORK, OVER_GIN = (NETWORK, NODES), ("kernels_gin.cu", "kernels_nodes_gin.cu")
LIBRARIES: dict[str, Library] = {**dict.fromkeys(OVER_NETWORK, NVSHMEM), **dict.fromkeys(OVER_GIN, NCCL)}
_THREADS = {**dict.fromkeys(("kernels.cu", WHOLE, RING_SOURCE), Tuning.threads), "activation.cu": ACTIVATION_THREADS}
_THREADS |= dict.fromkeys((*LIBRARIES, REHEARSED), Tuning.network_threads)


@dataclass(frozen=True)
class Variant:
    """One source with the constants that the just-in-time compiler defines. hidden = 0 means that any size is
    accepted."""

    source: str
    elem: str
    hidden: int = 0
    topk: int = 0
    codec: Codec = Codec.RAW  # encoding of rows in both directions
    sums: Sums = "ranked"

    def defines(self) -> dict[str, str | int]:
        sizes: dict[str, str | int] = {}
        if self.hidden:
            sizes = {"MOE_RT_HIDDEN": self.hidden, "MOE_RT_TOPK": self.topk}
            sizes |= {f"MOE_RT_{way}_CODEC": self.codec.enumerator for way in ("DISPATCH", "COMBINE")}
            sizes["MOE_RT_SUMS"] = SUMS_ENUMERATORS[self.sums]
        return {"MOE_RT_ELEM": self.elem, **sizes, "MOE_RT_THREADS": _THREADS[self.source]}

    def limited(self) -> bool:
        """True if limits are defined for its machine code: variants for the largest rows."""
        sizes = (self.elem, self.hidden, self.topk, self.sums)
        return self.source in ("kernels.cu", WHOLE, RING_SOURCE, REHEARSED) and sizes == ("Bf16", 7168, 8, "ranked")

    def limits(self, arch: str) -> dict[str, Limits]:
        """Limits of the kernels that only this source defines."""
        limits = LIMITS[arch][self.codec] if self.limited() and arch in LIMITS else {}
        if self.source == RING_SOURCE:
            limits = RING_LIMITS.get(arch, {}) if self.limited() else {}
        own = {WHOLE: WHOLE_KERNELS, REHEARSED: FORWARD_KERNELS}
        others = {name for source, names in own.items() if source != self.source for name in names}
        names = own.get(self.source, [name for name in limits if name not in others])
        return {name: limits[name] for name in names if name in limits}

    def is_for(self, arch: str) -> bool:
        """True if GPUs of this architecture have the features that the source needs."""
        library = LIBRARIES.get(self.source)
        if library is not None:
            return library.is_for(arch)
        return self.source != RING_SOURCE or has_bulk_copies(arch)

    def cells(self) -> list[Any]:
        elem = self.elem if self.codec is Codec.RAW else f"{self.elem} {self.codec.name}"
        elem = elem if self.sums == "ranked" else f"{elem} {self.sums}"
        return [self.source, elem, self.hidden or "any", self.topk or "any"]


LARGEST = Variant("kernels.cu", "Bf16", 7168, 8)
VARIANTS = (
    LARGEST,
    Variant("kernels.cu", "Bf16", 2048, 4),
    Variant("kernels.cu", "Bf16", 1000, 3),  # 125 vectors
    Variant("kernels.cu", "Bf16", 4096, 32),
    *(Variant("kernels.cu", elem, 2048, 4) for elem in ("F32", "F16", "F64")),
    *(Variant("kernels.cu", "Bf16", 7168, 8, codec) for codec in (Codec.FP8, Codec.INT8)),
    *(Variant(WHOLE, "Bf16", 7168, 8, codec) for codec in (Codec.RAW, Codec.FP8)),
    Variant("kernels.cu", "Bf16", 7168, 8, sums="invariant"),
    Variant(RING_SOURCE, "Bf16", 7168, 8),
    *(Variant(source, "Bf16", 7168, 8) for source in OVER_NETWORK),
    *(Variant(REHEARSED, "Bf16", 7168, 8, codec) for codec in (Codec.RAW, Codec.FP8)),
    *(Variant("activation.cu", elem) for elem in ("Bf16", "F32", "F16", "F64")),
)
# Compiled only if NCCL is installed, since no extra installs it.
GIN_VARIANTS = tuple(Variant(source, "Bf16", 7168, 8) for source in OVER_GIN)
# Variants that the other steps run, compiled first so that they are in the cache.
NEEDED = (
    *(Variant("kernels.cu", elem, 20, 3) for elem in ("F32", "Bf16", "F16", "F64")),
    Variant("kernels.cu", "F32", 17, 3),
    Variant("kernels.cu", "Bf16", 17, 3),
    Variant("kernels.cu", "Bf16", 20, 3, Codec.FP8),
    Variant("kernels.cu", "Bf16", 132, 3, Codec.INT8),
    *(Variant("kernels.cu", elem, 1024, 4) for elem in ("F32", "Bf16")),
    *(Variant(source, "F32", 20, 3) for source in (WHOLE, RING_SOURCE, *OVER_NETWORK, REHEARSED)),
    Variant(REHEARSED, "Bf16", 20, 3, Codec.FP8),
    Variant("kernels.cu", "Bf16", 20, 3, sums="invariant"),
    Variant(REHEARSED, "F32", 20, 3, sums="invariant"),
)


def variants_for(elem: str, hidden: int, topk: int, rows_as: str | None) -> tuple[Variant, ...]:
    """Return the variants that buffers of these sizes load: mapped peers, very few tokens, few blocks, NVSHMEM."""
    codec = Codec.RAW if rows_as is None else Codec[rows_as.upper()]
    sources = ("kernels.cu", WHOLE, RING_SOURCE, *OVER_NETWORK)
    return (*(Variant(source, elem, hidden, topk, codec) for source in sources), Variant("activation.cu", elem))


@dataclass(frozen=True)
class Job:
    variant: Variant
    arch: str
    to_ptx: bool = False
    cache: bool = False


def check(check: Check) -> None:
    """Run the step: compile everything for this GPU into the cache."""
    gpu = check.device if hasattr(check.device, "arch") else Gpu(check.device)
    compile_all((gpu.arch,), (*VARIANTS, *NEEDED), check, cache=True)


def over_gin(check: Check) -> tuple[Variant, ...]:
    """Variants for NCCL's network. If they cannot be compiled here, report why."""
    try:
        find_toolkit(NCCL)
    except CompileError as error:
        check.say(f"not compiled for NCCL's network: {error}")
        return ()
    return GIN_VARIANTS


def compile_all(archs: tuple[str, ...], variants: tuple[Variant, ...], check: Check, *, cache: bool) -> None:
    """Compile all variants whose source is present. A variant fails the check if it does not compile, spills, lacks a
    memory order that the protocol needs, or exceeds the limits of its machine code."""
    present = [v for v in variants if (source_dir() / "gpu" / v.source).is_file()]
    if absent := sorted({v.source for v in variants} - {v.source for v in present}):
        check.say(f"no source {', '.join(absent)}")
    jobs = [Job(variant, arch, cache=cache) for arch in archs for variant in present if variant.is_for(arch)]
    jobs += [Job(LARGEST, arch, to_ptx=True) for arch in archs if LARGEST in present]
    begin = time.monotonic()
    results = []
    for job, result in _results(jobs, check.seconds):
        results.append((job, result))
        check.announce(f"{len(results)} of {len(jobs)}: {_name(job)}")
    cached = sum(bool(r.get("from_cache")) for _, r in results)
    check.say(f"{len(jobs)} jobs, {cached} from the cache, {time.monotonic() - begin:.1f} s")
    compiled = [(job, r) for job, r in results if "kernels" in r]
    check.failures.extend(f"{_name(job)}: {r['error']}" for job, r in results if "error" in r)
    check.failures.extend(
        f"{_name(job)}: {name} spills {needs['spill_bytes']} bytes"
        for job, r in compiled
        for name, needs in r["kernels"].items()
        if needs["spill_bytes"] and job.variant.topk <= NO_SPILLS_UP_TO_TOPK and not may_keep(job, name)
    )
    check.failures.extend(f"PTX of {_name(job)}: {problem}" for job, r in results for problem in r.get("problems", ()))
    check.failures.extend(
        f"machine code of {_name(job)}: {wrong}" for job, r in results for wrong in r.get("wrong", ())
    )
    if not any("code" in r for _, r in results):
        check.say(f"machine code was not read: {INSTALL}")
    check.add(_resources_table(compiled))
    check.add(_code_table([(job, r["code"]) for job, r in results if "code" in r]))
    check.add(_orders_table([(job, r["orders"]) for job, r in results if "orders" in r]))


def _results(jobs: list[Job], seconds: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield results in the order of the jobs."""
    processes = min(len(os.sched_getaffinity(0)), len(jobs))
    if processes <= 1:
        yield from ((job, run_job(job)) for job in jobs)
        return
    deadline = time.monotonic() + seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # and torch with it, once for all processes
    # A server that an earlier call started has that call's environment. Leaving the pool ends the processes.
    with context.Pool(processes, _take_environment, (dict(os.environ),)) as pool:
        results = pool.imap(run_job, jobs)
        for job in jobs:
            try:
                yield job, results.next(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                yield job, {"error": f"not compiled within {seconds:g} s"}


def _take_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def may_keep(job: Job, name: str) -> bool:
    """True if a kernel is known to need more registers than it has. Its limit of local accesses then bounds the spills,
    except in kernels that NCCL's functions are compiled into."""
    if job.variant.source in OVER_GIN:
        return True
    limits = job.variant.limits(job.arch).get(name)
    return limits is not None and limits.local > 0


def run_job(job: Job) -> dict[str, Any]:
    """Run one job in a worker process. An exception becomes part of the result."""
    v = job.variant
    try:
        if job.to_ptx:
            orders = read_orders(compile_ptx(v.source, job.arch, v.defines()))
            return {"orders": {name: asdict(o) for name, o in orders.items()}, "problems": find_problems(orders)}
        binary = compile_kernels(v.source, job.arch, v.defines(), library=LIBRARIES.get(v.source), cache=job.cache)
        kernels = {name: asdict(needs) for name, needs in sorted(binary.resources.items())}
        return {
            "kernels": kernels,
            "from_cache": binary.from_cache,
            "seconds": binary.seconds,
            **_read_code(job, binary),
        }
    except Exception:
        return {"error": traceback.format_exc()}


def _read_code(job: Job, binary: Binary) -> dict[str, Any]:
    """Read the kernels' machine code and check it against the limits. Return nothing if no disassembler is
    installed."""
    tool = find_disassembler()
    if tool is None:
        return {}
    found = read_machine_code(disassemble(tool, binary.cubin))
    codes = {name: code for name, code in sorted(found.items()) if name in binary.resources}
    variant = job.variant
    may_spill = variant.topk > NO_SPILLS_UP_TO_TOPK or variant.source in LIBRARIES  # their functions have stacks
    # Other architectures have no limits, and code that may spill is not judged: the table only lists them.
    judged = job.arch in LIMITS and not may_spill
    wrong = find_wrong(codes, variant.limits(job.arch)) if judged else []
    return {"code": {name: asdict(code) for name, code in codes.items()}, "wrong": wrong}


def _name(job: Job) -> str:
    return " ".join(map(str, (*job.variant.cells(), job.arch)))


def _resources_table(compiled: list[tuple[Job, dict[str, Any]]]) -> Table:
    fields = ("registers", "stack_bytes", "spill_bytes", "shared_bytes")
    rows = [
        [*job.variant.cells(), job.arch, name, *(needs[f] for f in fields)]
        for job, result in compiled
        for name, needs in result["kernels"].items()
    ]
    columns = ["source", "dtype", "hidden", "topk", "arch", "kernel", "registers", "stack", "spills", "shared"]
    return Table("Kernels", columns, rows, "per thread; stack and spills in bytes, static shared memory per block")


def _code_table(found: list[tuple[Job, dict[str, Any]]]) -> Table:
    rows = [
        [*job.variant.cells(), job.arch, name, *(_cell(value) for value in code.values())]
        for job, kernels in found
        for name, code in kernels.items()
    ]
    columns = ["source", "dtype", "hidden", "topk", "arch", "kernel", *MachineCode.__dataclass_fields__]
    note = "loads and stores by bytes of a lane; ahead: how many are issued before one is needed"
    return Table("Machine code", columns, rows, note)


def _cell(value: Any) -> Any:
    return " ".join(f"{key}:{n}" for key, n in sorted(value.items())) if isinstance(value, dict) else value


def _orders_table(found: list[tuple[Job, dict[str, Any]]]) -> Table:
    rows = [
        [*job.variant.cells(), job.arch, name, *orders.values()]
        for job, kernels in found
        for name, orders in sorted(kernels.items())
    ]
    columns = ["source", "dtype", "hidden", "topk", "arch", "kernel", *Orders.__dataclass_fields__]
    return Table("Orders in PTX", columns, rows, "instructions in the text of each kernel")
