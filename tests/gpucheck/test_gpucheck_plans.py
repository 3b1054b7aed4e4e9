"""Compare what gpucheck runs, compiles, limits and estimates with a record, so that each change of it is meant.

After a change on purpose: python tests/gpucheck/test_gpucheck_plans.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpucheck.on_record import plain
from support.recorded import assert_on_record, write_record

from moe_rt.lab.check import (
    code_limits,
    compiling,
    correctness,
    emulated,
    estimate,
    graphs,
    layers,
    loads,
    measuring,
    pairs,
    processes,
    ring_estimate,
    sanitizing,
    scale,
    timing,
)
from moe_rt.lab.check.code_limits import Limits
from moe_rt.lab.check.compiling import Job, Variant
from moe_rt.lab.check.correctness import Case
from moe_rt.lab.check.estimate import MACHINES
from moe_rt.lab.check.estimate import STEPS as KERNELS
from moe_rt.lab.check.layers import LayerSizes
from moe_rt.lab.check.run import Run
from moe_rt.lab.check.steps import STEPS, Check, Step

RECORD = Path(__file__).parent / "gpucheck_plans.json"
ARCHS = ("sm_70", "sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


def steps() -> dict[str, Any]:
    return {name: plain(step) for name, step in STEPS.items()}


def cases() -> dict[str, Any]:
    """Return the cases of each number of ranks, and the tokens that ranks have."""
    found = {
        f"{size} ranks{', quick' if quick else ''}, {case.name}": plain(case)
        for size in correctness.SIZES
        for quick in (False, True)
        for case in correctness.cases(size, quick)
    }
    for idle in (False, True):
        case = Case("", most=7, idle=idle)
        tokens = {size: [case.num_tokens(size, turn) for turn in range(4)] for size in range(1, 6)}
        found[f"tokens, {'idle ranks' if idle else 'no idle rank'}"] = plain(tokens)
    found["on nodes"] = plain([correctness.NODES, correctness.CASES_ON_NODES])
    return found


def loads_of_steps() -> dict[str, Any]:
    """Return the loads that steps compare and time, and the buffers of loads."""
    transports = {f"transports, quick={quick}": scale.transports(quick) for quick in (False, True)}
    timed = {
        f"timed on {n}": timing.loads(SimpleNamespace(num_sms=n, device=torch.device("cpu"))) for n in (7, 8, 23, 24)
    }
    found: dict[str, Any] = {
        "smoke": scale.SMOKE,
        "scale": [scale.LOADS, scale.QUICK_LOADS],
        **transports,
        **timed,
        "loads": [loads.SIZES, loads.QUICK_SIZES],
        "processes": processes.TOKENS,
    }
    for load in (measuring.Load(1), measuring.Load(8, 128), measuring.Load(8, 129, 64, 2, 16, num_sms=8, rings=False)):
        found[f"buffer of {load.ranks} ranks, {load.tokens} tokens"] = load.buffer_kwargs()
    return plain(found)


def variants() -> dict[str, Any]:
    """Return what is compiled: the constants, the architectures, and the kernels with limits on each of them."""
    lists = {name: getattr(compiling, name) for name in ("VARIANTS", "NEEDED", "GIN_VARIANTS")}
    lists["for bf16"] = compiling.variants_for("Bf16", 64, 3, None)
    lists["for fp8"] = compiling.variants_for("F16", 96, 2, "fp8")
    return {
        f"{name} {number}": [
            plain(v), v.cells(), v.defines(), [arch for arch in ARCHS if v.is_for(arch)],
            {arch: list(limits) for arch in ARCHS if (limits := v.limits(arch))},
        ]
        for name, some in lists.items()
        for number, v in enumerate(some)
    }  # fmt: skip


def limits() -> dict[str, Any]:
    found = {f"{arch} {codec.name}": of for arch, by in code_limits.LIMITS.items() for codec, of in by.items()}
    found |= {f"{arch} rings": of for arch, of in code_limits.RING_LIMITS.items()}
    return {
        f"{name} {kernel}": [getattr(limit, f.name) for f in fields(limit)]
        for name, of in found.items()
        for kernel, limit in of.items()
    }


def estimates() -> dict[str, Any]:
    """Return estimates of GPUs, and of machines on which one thing limits every launch."""
    h200 = next(machine for machine in MACHINES if machine.name == "H200")
    fast = replace(h200, memory=1e18, link=1e18, from_memory_s=1e-12, from_peer_s=2e-12, clock=1e18)
    slow = {name: replace(fast, **{name: getattr(h200, name)}) for name in ("memory", "link", "from_memory_s", "clock")}
    slow["from_peer_s"] = replace(fast, from_peer_s=h200.from_peer_s)
    asked = [(m.name, m, estimate.Load(n, coded=coded)) for m in MACHINES[1:] for coded in (False, True)
             for n in ((1, 3, 64, 65, 128, 4096) if m is h200 else (65, 4096))]  # fmt: skip
    odd: dict[str, Any] = {"ranks": 4, "topk": 5, "experts": 60, "hidden": 1000, "elem": 4}
    asked += [(name, machine, estimate.Load(n, **odd)) for name, machine in slow.items() for n in (2, 100, 3000)]
    found: dict[str, Any] = {"machines": MACHINES, "blocks of rings": list(map(ring_estimate.most_blocks, MACHINES))}
    for name, machine, load in asked:
        for kernel in KERNELS:
            values = []
            for blocks in (None, 8):
                of = estimate.estimate(kernel, load, machine, blocks)
                values += [of.seconds, of.steps_s, of.rows_s, of.bytes_per_sm, of.fewest_bytes]
            ring = estimate.estimate(kernel, load, machine, 8)
            if not load.coded and load.elem == 2:
                ring = ring_estimate.estimate_ring(kernel, load, machine, 8)
            key = f"{kernel} on {name}, {load.tokens} tokens{', coded' if load.coded else ''}"
            found[key] = [*values, ring.seconds, ring.rows_s, ring.bytes_per_sm]
    return plain(found)


def defaults() -> dict[str, Any]:
    """Return the defaults of the sizes that steps choose."""
    kinds = (Run, Case, Job, Variant, Limits, Check, LayerSizes, Step, measuring.Load, estimate.Load, estimate.Steps)
    return {
        f"{kind.__module__.rpartition('.')[2]} {kind.__name__}": {
            f.name: plain(f.default) for f in fields(kind) if f.default is not MISSING and not callable(f.default)
        }
        for kind in kinds
    }


def repetitions() -> dict[str, Any]:
    """Return how often what is timed is repeated, and on how many blocks."""
    return {
        "pairs": [pairs.WARM_UP, pairs.PAIRS_IN_GRAPH, pairs.REPLAYS, pairs.LOOPS, pairs.OPS_IN_A_ROW],
        "timing": [*timing.BLOCKS, timing.OVERLAP_WARM_UP, timing.RUNS, timing.QUICK_RUNS],
        "loads": [loads.WARM_UP, loads.RUNS, loads.QUICK_RUNS],
        "layers": [layers.WARM_UP, graphs.WARM_UP],
    }


def words() -> dict[str, Any]:
    """Return what steps say where they cannot run, and how tools are called."""
    found: dict[str, Any] = {"emulated": [emulated.CARD, emulated.NOT_REHEARSED], "sanitizer": sanitizing.TOOLS}
    found |= {"environment": sanitizing.ENVIRONMENT, "published": [(*k, us) for k, us in estimate.TARGETS_US.items()]}
    return plain(found | {"targets": [measuring.TARGETS, timing.TARGET_GRAPH_US, timing.TARGET_HOST_US]})


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    part.__name__: part
    for part in (steps, cases, loads_of_steps, variants, limits, estimates, defaults, repetitions, words)
}


@pytest.mark.parametrize("part", PARTS)
def test_what_gpucheck_does_is_on_record(part: str) -> None:
    assert_on_record(RECORD, part, PARTS[part]())


if __name__ == "__main__":
    write_record(RECORD, {name: part() for name, part in PARTS.items()})
