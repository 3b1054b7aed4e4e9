"""Compare what each step asks for and what it reports with a record; the work on a GPU is replaced by made-up results.

After a change on purpose: python tests/gpucheck/test_gpucheck_reports.py
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpucheck.on_record import Fakes, Named
from support.recorded import assert_on_record, write_record

from moe_rt.config.codec import Codec
from moe_rt.engine.gpu.launcher import RING_SOURCE
from moe_rt.lab.check import (
    compiling,
    correctness,
    failures,
    graphs,
    layers,
    loads,
    measuring,
    network,
    processes,
    sanitizing,
    scale,
    timing,
    training,
)
from moe_rt.lab.check.compiling import LARGEST, Job, Variant
from moe_rt.lab.check.measuring import Load
from moe_rt.lab.check.pairs import Times
from moe_rt.lab.check.steps import STEPS, Check, perform
from moe_rt.lab.testing.rounds import WrongOutput

RECORD = Path(__file__).parent / "gpucheck_reports.json"


GPU = Named(name="gpu", device=torch.device("cuda", 0), num_sms=16, arch="sm_90a")
NO_GPU = Named(name="cpu", device=torch.device("cpu"))


def report(step: str, check: Check) -> list[Any]:
    """Return a step's record. Of an error it has the lines that do not depend on the source's text."""
    record = perform(STEPS[step], check)
    error = [line for line in record["error"].splitlines() if not line.startswith((" ", "Traceback"))]
    return [record["result"], record["detail"], error, *record["tables"]]


def sizes(check: Check) -> list[int]:
    """Return the number of rows of each table, and of failures."""
    return [*(len(table.rows) for table in check.tables), len(check.failures)]


def wrong(*arguments: Any, **keywords: Any) -> None:
    raise WrongOutput("out differs")


def wrong_if(condition: Callable[..., bool]) -> Callable[..., None]:
    return lambda *given, **how: wrong() if condition(*given, **how) else None


def of_correctness(fakes: Fakes) -> None:
    fakes(correctness, "run_case", wrong_if(lambda device, size, case, *_, **how: case.name in ("distinct", "random")))
    fakes(correctness, "run_chain")
    fakes.clock(correctness)


def of_scale(fakes: Fakes) -> None:
    fakes(scale, "run_case", wrong_if(lambda device, size, case, *_, **how: case.name == "whole ops"))
    fakes(scale, "compare_with_torch", lambda device, load, seconds: 8 * load.ranks * load.tokens)
    fakes(scale, "from_token_windows", wrong_if(lambda device, size: size == 2))


def of_smoke(fakes: Fakes) -> None:
    fakes(scale, "run_case", wrong_if(lambda device, size, case, *_, **how: size == 2))


def of_graphs(fakes: Fakes) -> None:
    fakes(graphs, "run_graph", wrong_if(lambda device, size, *_, **how: size == 2))


def of_layers(fakes: Fakes) -> None:
    def results(factor: float) -> dict[str, Any]:
        return {"out": torch.tensor([-2.0, 1.0]) * factor, "x": torch.tensor([4.0, 0.5]) + factor}

    compiled = Named(name="compiled layer")
    layer = Named(name="layer", buffer=SimpleNamespace(close=lambda: fakes.calls.append("close")))
    fakes(layers, "make_layer", lambda *given: (layer, "x"))
    fakes(layers, "forward_backward", lambda of, call, x: results(1.00002 if call is compiled else 1.0))
    fakes(layers, "dense_results", lambda of, x: results(1.00001))
    fakes(torch.compiler, "reset")
    fakes(torch, "compile", compiled)
    fakes(layers, "made_under", wrong_if(lambda device, default, *_: default == "cpu"))
    fakes(layers, "with_idle_experts", lambda device, sizes, rows: rows.append(["idle"]))


def of_training(fakes: Fakes) -> None:
    fakes(training, "under_autocast", lambda device, sizes, rows: rows.append(["under autocast", "out", 0.01, 0.04]))
    fakes(training, "optimised", lambda device, sizes, steps: f"loss 1 to 0.5 in {steps} steps")
    fakes(training, "on_virtual_ranks", wrong)


def of_errors(fakes: Fakes) -> None:
    for trial in ("late_peer", "bad_expert", "shared_stream", "too_many_ranks"):
        fakes(failures, trial, f"an error of {trial}")
    fakes(failures, "overflow", wrong)


def times(load: Load) -> Times:
    """Return times in which one launch follows another, on each rank some us later than on the one before."""
    turns = {
        name: [[(1000.0 * turn + 100 * place + 5 * rank, 1000.0 * turn + 100 * (place + 1) + 7 * rank + turn)
                for rank in range(load.ranks)] for turn in range(3)]
        for place, name in enumerate(measuring.ROLES)
    }  # fmt: skip
    ops = {"dispatch": 2.1e-4 * load.ranks, "combine": 3.3e-4 * load.ranks}
    num_bytes = measuring.fewest_bytes(load.ranks * load.tokens, 3 * load.tokens, 8 * load.tokens, 2 * load.hidden)
    return Times(ops, turns, 4.4e-4 + 1e-6 * load.ranks, num_bytes)


def of_timing(fakes: Fakes) -> None:
    found = {"replayed": 2.4e-5, "host_seconds": {"dispatch": 1.6e-5, "combine": 1.4e-5}}
    fakes(timing, "times_of", lambda device, load, *rest, **how: times(load))
    fakes(timing, "CopyCeiling", Named(name="ceiling", of=lambda num_bytes: 8e12 + num_bytes))
    fakes(timing, "on_one_rank", lambda device, tokens, measure, seconds: found[measure.__name__])
    fakes(timing, "overlap_seconds", lambda device, blocks, *rest: (1e-4 * blocks, 2e-3, 2.2e-3))
    fakes.patch.setattr(timing, "num_sms", lambda device: device.num_sms)


def of_loads(fakes: Fakes) -> None:
    fakes(loads, "times_of", lambda device, load, *rest, **how: wrong() if load.tokens == 64 else times(load))
    fakes(loads, "CopyCeiling", "ceiling")
    fakes(loads, "alternatives", (1e-3, 1.23456e-4))
    fakes.patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="NVIDIA H200"))


def of_network(fakes: Fakes) -> None:
    fakes.patch.setattr(importlib.util, "find_spec", lambda name: name == "nvshmem" or None)
    fakes(network, "mps_is_running", True)
    fakes(network, "run_processes", wrong_if(lambda device, size, *_: size == 2))
    fakes.clock(network)


def of_processes(fakes: Fakes) -> None:
    ops = [["dispatch", 128, 12.5, 200.0, "read"], ["combine", 128, 20.5, 100.0, "write"]]
    found = {"rounds": "3 rounds of 4 processes equal", "speed": {"ops": ops, "read": 300.0, "write": 370.0}}
    fakes(processes, "run_part", lambda name, *rest: found[name] if name in found else wrong())
    fakes.clock(processes)


def of_sanitizer(fakes: Fakes) -> None:
    fakes(sanitizing, "find_tool", "/tools/compute-sanitizer")
    fakes(sanitizing, "sanitize", lambda tool, *rest: wrong() if "racecheck" in tool else "ERROR SUMMARY: 0 errors")
    fakes.clock(sanitizing)


SPILLING = {"registers": 128, "stack_bytes": 8, "spill_bytes": 4, "shared_bytes": 16}
CODE = {"loads": {16: 4, 2: 1}, "stores": {}, "ahead": {16: 3}, "local": 1, "barriers": 2, "fences": {"M.SYS": 1},
        "copies": {}, "instructions": 99}  # fmt: skip
ORDERS = {"wide_loads": 1, "wide_stores": 2, "releases": 3, "acquires": 4, "last_block": 5}


def compiled(job: Job) -> dict[str, Any]:
    """Return what a job might give: PTX without some order, code with spills, or an error."""
    if job.to_ptx:
        orders = {"dispatch_send": ORDERS, "combine_send": {**ORDERS, "releases": 0}}
        return {"orders": orders, "problems": ["combine_send: got no st.release.sys"]}
    if job.variant.elem == "F64":
        return {"error": "it does not compile"}
    kernels = dict.fromkeys(("dispatch_receive", "combine_send"), SPILLING)
    kernels["dispatch_send"] = {**SPILLING, "spill_bytes": 0}
    result: dict[str, Any] = {"kernels": kernels, "from_cache": job.cache and job.variant.topk == 8}
    if job.variant.codec:
        result |= {"code": {"dispatch_receive": CODE}, "wrong": ["dispatch_receive: got 1 barriers"]}
    return result


TRIED = (
    LARGEST,
    replace(LARGEST, codec=Codec.FP8),
    replace(LARGEST, topk=9),
    replace(LARGEST, source=RING_SOURCE),
    replace(LARGEST, source=compiling.NODES),
    *compiling.GIN_VARIANTS,
    Variant("kernels.cu", "F64", 20, 3, sums="invariant"),
    Variant("not_written.cu", "F32"),
    Variant("nor_written.cu", "F32"),
)


def of_compiling(fakes: Fakes) -> None:
    fakes(compiling, "_results", lambda jobs, seconds: [(job, compiled(job)) for job in jobs])
    fakes.patch.setattr(compiling, "VARIANTS", TRIED)
    fakes.patch.setattr(compiling, "NEEDED", TRIED[:1])
    fakes.clock(compiling)


SCENES: dict[str, tuple[str, Callable[[Fakes], None], list[dict[str, Any]]]] = {
    "correctness": ("correctness", of_correctness, [{}, {"quick": True}, {"sizes": (3,), "seconds": 25.0}]),
    "two levels": ("nodes", of_correctness, [{}, {"quick": True, "seconds": 25.0}]),
    "chains": ("chains", of_correctness, [{}, {"quick": True}]),
    "scale": ("scale", of_scale, [{}, {"quick": True}, {"sizes": (1, 4)}]),
    "smoke": ("smoke", of_smoke, [{}, {"quick": True}, {"sizes": (1,)}, {"sizes": (1, 2)}, {"sizes": (2, 4)}]),
    "graphs": ("graphs", of_graphs, [{}, {"quick": True}, {"sizes": (4,)}]),
    "layer": ("layer", of_layers, [{}]),
    "training": ("training", of_training, [{}, {"quick": True}]),
    "errors": ("errors", of_errors, [{}, {"device": NO_GPU}]),
    "timing": ("timing", of_timing, [{}, {"quick": True}, {"sizes": (2,), "seconds": 30.0}]),
    "loads": ("loads", of_loads, [{}, {"quick": True}, {"sizes": (2,)}]),
    "nvshmem": ("nvshmem", of_network, [{}, {"seconds": 5.0}]),
    "processes": ("processes", of_processes, [{"nproc": 4}, {"nproc": 2, "seconds": 9.0}, {}]),
    "sanitizer": ("sanitizer", of_sanitizer, [{"seconds": 400.0}, {"seconds": 3.0}]),
    "compile": ("compile", of_compiling, [{}, {"device": Named(name="another gpu", arch="sm_120a")}]),
}


def played(name: str) -> dict[str, Any]:
    """Return the calls of a step and its report, by its options."""
    step, prepare, options = SCENES[name]
    found: dict[str, Any] = {}
    for given in options:
        with pytest.MonkeyPatch.context() as patch:
            fakes = Fakes(patch)
            prepare(fakes)
            check = Check(**{"device": GPU, **given})
            check.save = lambda of, calls=fakes.calls: calls.append(f"saved {len(of.details)} {sizes(of)}")  # type: ignore[misc]
            lines = [*report(step, check), *fakes.calls]
        asked = ", ".join(f"{key}={value}" for key, value in given.items())
        found |= {f"{name}({asked}) {number}": line for number, line in enumerate(lines)}
    return found


@pytest.mark.parametrize("name", SCENES)
def test_calls_and_report_of_a_step_are_on_record(name: str) -> None:
    assert_on_record(RECORD, name, played(name))


if __name__ == "__main__":
    write_record(RECORD, {name: played(name) for name in SCENES})
