"""Rounds of virtual ranks assigned to several nodes: the two-level route, with copies in place of a network."""

from __future__ import annotations

from typing import Any

import torch

from moe_rt.config.topology import Topology
from moe_rt.gpucheck.correctness import CASE_S, FP8, ROUNDS, Case, run_case
from moe_rt.gpucheck.steps import Check, Table

NODES = (Topology((0, 0, 1)), Topology((0, 0, 1, 1)), Topology((0, 1, 2)), Topology((0, 1, 0, 1, 0)))
CASES = (
    Case("random"),
    Case("all to one expert", "one_expert"),
    Case("rows of tokens", changes={"layout": "tokens"}),
    Case("dropped", "topk", idle=False, changes={"capacity_factor": 0.4, "overflow": "drop"}),
    Case("fp8 both ways", "topk", changes={"dtype": torch.bfloat16, "dispatch_dtype": FP8, "combine_dtype": FP8}),
)


def check(check: Check) -> None:
    rows: list[list[Any]] = []
    rounds = 1 if check.quick else ROUNDS
    for topology in NODES[:1] if check.quick else NODES:
        for case in CASES[:1] if check.quick else CASES:
            with check.part(f"{case.name}, {topology}"):
                seconds = min(CASE_S, check.seconds)
                run_case(check.device, topology.num_ranks, case, rounds, seconds=seconds, topology=topology)
                rows.append([str(topology.nodes), case.name, rounds, "equal"])
    check.say(f"{len(rows)} cases equal, {len(check.failures)} not; gets and puts were copies")
    columns = ["node of each rank", "case", "rounds", "forward and backward"]
    check.add(Table("Two levels", columns, rows, "bit for bit; weight gradients within 1e-4"))
