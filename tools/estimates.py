"""Compute the estimates in docs/cuda_estimates.md from sizes and from the limits on machine code; no GPU is needed.

python tools/estimates.py          # exits with 1 if the document differs from the kernels
python tools/estimates.py --write  # updates the document
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.jit import compile_kernels
from moe_rt.engine.gpu.launcher import RING_KERNELS
from moe_rt.lab.check.compiling import LARGEST, WHOLE
from moe_rt.lab.check.estimate import (
    MACHINES,
    OPS,
    STEPS,
    TARGETS_US,
    WHOLE_OPS,
    Estimate,
    Load,
    Machine,
    estimate,
    launches_of,
    op_us,
)
from moe_rt.lab.check.kernel_code import INSTALL, MachineCode, disassemble, find_disassembler, read_machine_code
from moe_rt.lab.check.ring_estimate import estimate_ring

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = "docs/cuda_estimates.md"
ARCH = "sm_90a"
TOKENS = (1, 128, 4096)
FEW = (8, 16, 24)  # multiprocessors


def read_kernels(codec: Codec) -> dict[str, MachineCode]:
    """Machine code of each kernel for 14,336-byte rows in this encoding, compiled unless it is in the cache.

    Raises:
        RuntimeError: no disassembler is installed.
    """
    tool = find_disassembler()
    if tool is None:
        raise RuntimeError(INSTALL)
    found: dict[str, MachineCode] = {}
    for source in (WHOLE, LARGEST.source):
        binary = compile_kernels(source, ARCH, replace(LARGEST, source=source, codec=codec).defines())
        found |= read_machine_code(disassemble(tool, binary.cubin))
    return found


def launches_table() -> str:
    """Every launch: bytes moved at its largest token count, and its least time for each token count and GPU."""
    lines = [
        "| Launch | moved | of which by links | " + " | ".join(f"T = {t}" for t in TOKENS) + " |",
        "|---|---|---|" + "---|" * len(TOKENS),
    ]
    for coded in (False, True):
        for kernel in STEPS:
            if coded and not kernel.startswith("dispatch"):
                continue
            every = [[estimated(kernel, Load(t, coded=coded), m) for m in MACHINES] for t in TOKENS]
            (*_, (most, *_)) = (of for of in every if of[0])
            times = " | ".join(" / ".join(us(each.seconds) for each in of if each) or "-" for of in every)
            name = f"`{kernel}`, rows as fp8" if coded else f"`{kernel}`"
            moved = " | ".join(mb(n) for n in (most.memory_bytes, most.link_bytes))
            lines.append(f"| {name} | {moved} | {times} |")
    return "\n".join(lines)


def estimated(kernel: str, load: Load, machine: Machine) -> Estimate | None:
    """Estimate of a launch, or None if the op has other launches at this load."""
    op = next(op for op, launches in OPS.items() if kernel in launches or WHOLE_OPS.get(kernel) == launches)
    return estimate(kernel, load, machine) if kernel in launches_of(op, load) else None


def few_table() -> str:
    """Launches of many rows on few multiprocessors, for kernels with rings: through registers and through rings."""
    numbers = " | ".join(f"{n} SMs" for n in FEW)
    lines = [f"| Launch | rows go through | {numbers} |", "|---|---|" + "---|" * len(FEW)]
    load = Load(TOKENS[-1])
    for kernel in RING_KERNELS:
        for how, of in (("registers", estimate), ("rings", estimate_ring)):
            every = [[of(kernel, load, machine, n) for machine in MACHINES] for n in FEW]
            times = " | ".join(" / ".join(us(each.seconds) for each in of_few) for of_few in every)
            lines.append(f"| `{kernel}` | {how} | {times} |")
    return "\n".join(lines)


def targets_table() -> str:
    """Launches of an op on an H200, compared with DeepEP's published times on eight."""
    (h200,) = (machine for machine in MACHINES if machine.name == "H200")
    lines = ["| Op on 8 H200 | T | estimate, us | DeepEP, us |", "|---|---|---|---|"]
    for name, op, coded in (
        ("dispatch", "dispatch", False),
        ("dispatch, rows as fp8", "dispatch", True),
        ("combine", "combine", False),
    ):
        for tokens in TOKENS:
            got, target = op_us(op, Load(tokens, coded=coded), h200), TARGETS_US[op, tokens]
            lines.append(f"| {name} | {tokens} | {us(got / 1e6)} | {target:g} |")
    return "\n".join(lines)


def us(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.{2 if 0 < num_bytes < 1e6 else 0}f} MB"


def generated(root: Path) -> str:
    """Expected text of the document."""
    from moe_rt.diagnostics.output import with_section

    text = (root / DOCUMENT).read_text()
    assert OPS.keys() >= {op for op, _ in TARGETS_US}
    text = with_section(text, "estimates:launches", launches_table())
    text = with_section(text, "estimates:few", few_table())
    return with_section(text, "estimates:targets", targets_table())


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Estimates of {DOCUMENT}, from the machine code of today's kernels.")
    parser.add_argument("--write", action="store_true", help="write what differs")
    write = parser.parse_args().write
    text = generated(ROOT)
    if text == (ROOT / DOCUMENT).read_text():
        return 0
    print(f"{DOCUMENT} {'written' if write else 'differs from the kernels'}")
    if write:
        (ROOT / DOCUMENT).write_text(text)
    return 0 if write else 1


if __name__ == "__main__":
    sys.exit(main())
