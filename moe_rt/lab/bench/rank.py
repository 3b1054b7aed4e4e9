"""The program of a rank: `python -m moe_rt.lab.bench.rank DIRECTORY` runs the cases in directory/job.json.

Rank 0 prints lines of JSON: {"progress": fraction of a case} and {"record": a finished case}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants import find
from moe_rt.lab.bench.contestants.base import Contestant, Step, Unavailable
from moe_rt.lab.bench.contestants.moe import MoeRt
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.inputs import Inputs, make_inputs, num_rotations
from moe_rt.lab.bench.links import Links, round_trip_us
from moe_rt.lab.bench.measure import measure
from moe_rt.lab.bench.observe import line_latency_ns, observe_layer, observe_pair
from moe_rt.lab.bench.trace import trace_layer
from moe_rt.lab.bench.traffic import bytes_moved
from moe_rt.lab.bench.world import World, join_processes, run_threads
from moe_rt.lab.testing.programs import end_with_starter


@dataclass(frozen=True)
class Job:
    """Cases for the same ranks, and how to measure them."""

    cases: list[Case]
    contestants: list[str]
    cores: list[int]
    iters: int
    warmup: int
    seed: int
    cold: bool
    trace: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "cases": [Case(**case) for case in fields["cases"]]})


def run_case(world: World, job: Job, case: Case, progress: Callable[[float], None]) -> dict[str, Any]:
    """Run every contestant on one case. Collective; every rank gets the same record."""
    rotations = num_rotations(case, world.processor.cache_bytes)
    inputs = [make_inputs(case, job.seed, world.rank, i).to(world.processor.device) for i in range(rotations)]
    expect = Expectation(case, job.seed, world.rank, rotations)
    present, absent = _enter(world, job, case)
    record: dict[str, Any] = {
        "case": asdict(case),
        "device": world.processor.name,
        "rotations": rotations,
        "absent": absent,
        "bytes": bytes_moved(case, expect.traffic()),
    }
    with torch.no_grad():
        entries = [(c, step) for c in present for step in c.steps(inputs, expect)]
    times = measure(world, [step for _, step in entries], job.iters, job.warmup, job.cold, progress)
    record["results"] = [
        {"contestant": c.name, "phase": step.phase, **asdict(t)} for (c, step), t in zip(entries, times, strict=True)
    ]
    if case.nodes:
        links = Links(case, job.seed, rotations)
        record["least_us"], record["round_trip_us"] = links.least_us, round_trip_us(world, case.topology)
        for (c, step), result in zip(entries, record["results"], strict=True):
            result["link"] = links.count(world, step, c.unit)
    for contestant in present:
        if isinstance(contestant, MoeRt) and not case.on_gpu:
            record["line_latency_ns"] = line_latency_ns(world, contestant.buffer, inputs[0])
        if type(contestant) is MoeRt:
            own = [step for c, step in entries if c is contestant]
            record["moe_rt"] = {"heap_bytes": contestant.buffer.num_bytes, "route": contestant.buffer.route}
            record["moe_rt"] |= _observe(world, job, contestant, own, inputs)
        if job.trace and isinstance(contestant, MoeRt) and case.op == "layer":
            own = [step for c, step in entries if c is contestant]
            record.setdefault("trace", []).extend(trace_layer(world, contestant.buffer, own, contestant.name))
        contestant.close()
    return record


def _observe(world: World, job: Job, contestant: MoeRt, steps: list[Step], inputs: list[Inputs]) -> dict[str, Any]:
    if contestant.case.on_gpu:
        return {}  # the host does not observe a GPU's ops
    if contestant.case.op == "layer":
        return observe_layer(world, contestant.buffer, steps, job.cold)
    return observe_pair(world, contestant.buffer, inputs, job.cold)


def _enter(world: World, job: Job, case: Case) -> tuple[list[Contestant], dict[str, str]]:
    """Contestants that can run on every rank, and the reasons of the others."""
    present: list[Contestant] = []
    absent: dict[str, str] = {}
    for name in job.contestants:
        reason = ""
        try:
            contestant = find(name)(case, world)
        except Unavailable as error:
            reason = str(error)
        reasons = [text for text in world.gather(reason) if text]
        if reasons:
            absent[name] = reasons[0]
        else:
            present.append(contestant)
    return present, absent


def run_job(world: World, job: Job) -> None:
    """Run all cases in order; rank 0 reports."""

    def say(**message: object) -> None:
        if world.rank == 0:
            print(json.dumps(message), flush=True)

    for case in job.cases:
        say(record=run_case(world, job, case, lambda part: say(progress=part)))


def main() -> None:
    end_with_starter()
    directory = Path(sys.argv[1])
    job = Job.from_json((directory / "job.json").read_text())
    first = job.cases[0]
    if first.as_processes:
        run_job(join_processes(directory, first.ranks, job.cores, first.on_gpu), job)
        dist.destroy_process_group()
    else:
        reserve = max(case.reserved_bytes for case in job.cases)
        device = "cuda" if first.on_gpu else "cpu"
        run_threads(first.ranks, job.cores, lambda world: run_job(world, job), device, reserve)


if __name__ == "__main__":
    main()
