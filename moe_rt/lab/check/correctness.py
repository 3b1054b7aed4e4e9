"""Rounds of virtual ranks against the reference, for all dtypes, routes, and kinds of routing with their own code."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from moe_rt.buffer.buffer import Buffer
from moe_rt.config.codec import RowFormat
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import (
    Inputs,
    buffer_kwargs,
    check_bits,
    expect,
    expect_forward,
    experts,
    make_inputs,
    make_scaled,
    make_spec,
    play,
    play_scaled,
)

SIZES, QUICK_SIZES = (1, 2, 4, 8), (1, 2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = torch.float8_e4m3fn
ROUNDS = 3  # windows alternate, and the third round reuses the first round's window
TIMEOUT_S, CASE_S = 20.0, 60.0  # per wait and per case
Play: TypeAlias = Callable[[Buffer, int, torch.device], None]  # plays one rank's part of a turn


@dataclass(frozen=True)
class Case:
    """One case. Some rank has `most` tokens and another has none, if there are several ranks.

    With `row` the tokens are codes and scales. With `coded` the buffer encodes them and delivers them encoded.
    """

    name: str
    kind: str = "random"
    most: int = 12
    idle: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    idx_dtype: torch.dtype = torch.int64
    row: RowFormat | None = None
    coded: bool = False

    def num_tokens(self, size: int, turn: int) -> list[int]:
        if size == 1 or not self.idle:
            return [self.most] * size
        tokens = [(5 * r + turn) % (self.most + 1) for r in range(size)]
        tokens[turn % size], tokens[(turn + 1) % size] = 0, self.most
        return tokens


def cases(size: int, quick: bool) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16) if quick else DTYPES
    scattered = [(e * 5 + 2) % size for e in range(9)]
    drop = {"capacity_factor": 0.4, "overflow": "drop"}
    bf16, tokens = {"dtype": torch.bfloat16}, {"layout": "tokens"}
    fp8, int8 = ({f"{op}_dtype": d for op in ("dispatch", "combine")} for d in (FP8, torch.int8))
    found = [Case(f"random {_short(d)}", changes={"dtype": d}) for d in dtypes]
    found += [
        Case("distinct", "topk"),
        Case("all to one expert", "one_expert"),
        Case("odd rows", changes={"hidden": 17}),
        Case("odd rows bf16", changes={"hidden": 17, "dtype": torch.bfloat16}),
        Case("dropped", "topk", idle=False, changes=drop),
        Case("rows of tokens", changes=tokens),
        Case("aligned experts", changes={"expert_alignment": 16}),
        Case("rows that return one by one", changes=bf16 | {"sums": "invariant"}),
        Case("a bound of the call", most=7, max_tokens=7, idx_dtype=torch.int32),
        Case("rows with scales", changes=bf16, row=RowFormat(FP8, 20, torch.float32, 2)),
        Case("two codes in a byte", changes=bf16 | tokens, row=RowFormat(torch.uint8, 10, torch.uint8, 5)),
        Case("codes of the buffer", changes=bf16 | fp8, coded=True),
        Case("fp8 both ways", "topk", changes=bf16 | fp8),
        Case("int8 both ways", changes=bf16 | int8 | {"hidden": 132}),
    ]
    if set(scattered) == set(range(size)):
        found.append(Case("scattered placement", changes={"placement": scattered}))
    if quick:
        return found
    found.append(Case("no tokens", most=0))
    # More tokens than blocks: warps then take rows, instead of blocks.
    found.append(Case("many tokens", most=200 if size == 1 else 64, changes={"num_max_tokens_per_rank": 200}))
    if size <= 2:
        real = {"hidden": 7168, "num_topk": 8, "num_experts": 16, "dtype": torch.bfloat16}
        found.append(Case("large rows", "topk", most=8, changes=real))
        scaled = RowFormat(FP8, 7168, torch.float32, 56)
        found.append(Case("large rows with scales", "topk", most=8, changes=real, row=scaled))
        found.append(Case("large rows as fp8", "topk", most=8, changes=real | fp8))
    return found


def check(check: Check) -> None:
    columns = ["ranks", "case", "rounds", "forward and backward"]
    rows = check.begin("Correctness", columns, "bit for bit; weight gradients within 1e-4")
    for size in check.sizes or (QUICK_SIZES if check.quick else SIZES):
        for case in cases(size, check.quick):
            with check.part(f"{case.name}, {size} ranks"):
                rounds = 1 if check.quick else ROUNDS
                run_case(check.device, size, case, rounds, seconds=min(CASE_S, check.seconds))
                rows.append([size, case.name, rounds, "equal"])
    check.say(f"{len(rows)} cases equal, {len(check.failures)} not")


def run_case(
    device: Any,
    size: int,
    case: Case,
    rounds: int = ROUNDS,
    *,
    seconds: float = 60.0,
    topology: Topology | None = None,
) -> None:
    """Play several rounds with fresh inputs in one buffer. The reference is computed once, before the ranks start.

    With a topology, rows take the two-level route.
    """
    spec = make_spec(size, **case.changes)
    if topology is not None:
        spec = replace(spec, route="two_level", topology=topology)
    seeds = [1000 * size + 10 * turn + len(case.name) for turn in range(rounds)]
    inputs = [make_inputs(spec, case.num_tokens(size, turn), seed, case.kind) for turn, seed in enumerate(seeds)]
    for given in inputs:
        given.topk_idx[:] = [idx.to(case.idx_dtype) for idx in given.topk_idx]
    play_one = _scaled_rounds(case, inputs, seeds) if case.row or case.coded else _rounds(spec, case, inputs, seeds)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(spec)) as buffer:
            for turn in range(rounds):
                play_one(buffer, turn, torch_device(device))
            buffer.check()

    ThreadRanks(size, device, nodes=None if topology is None else topology.nodes).run(work, seconds=seconds)


def _rounds(spec: BufferSpec, case: Case, inputs: list[Inputs], seeds: list[int]) -> Play:
    expected = [expect(spec, given, seed, case.max_tokens) for given, seed in zip(inputs, seeds, strict=True)]

    def play_one(buffer: Buffer, turn: int, device: torch.device) -> None:
        play(buffer, inputs[turn], expected[turn], device, turn, max_tokens=case.max_tokens, rows_to_spare=turn)

    return play_one


def _scaled_rounds(case: Case, inputs: list[Inputs], seeds: list[int]) -> Play:
    made = [
        None if case.row is None else make_scaled(case.row, given.num_tokens, seed)
        for given, seed in zip(inputs, seeds, strict=True)
    ]

    def play_one(buffer: Buffer, turn: int, device: torch.device) -> None:
        play_scaled(buffer, inputs[turn], made[turn], device, turn, max_tokens=case.max_tokens)

    return play_one


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


NODES = (Topology((0, 0, 1)), Topology((0, 0, 1, 1)), Topology((0, 1, 2)), Topology((0, 1, 0, 1, 0)))
CASES_ON_NODES = (
    Case("random"),
    Case("rows that return one by one", changes={"sums": "invariant"}),
    Case("all to one expert", "one_expert"),
    Case("rows of tokens", changes={"layout": "tokens"}),
    Case("dropped", "topk", idle=False, changes={"capacity_factor": 0.4, "overflow": "drop"}),
    Case("fp8 both ways", "topk", changes={"dtype": torch.bfloat16, "dispatch_dtype": FP8, "combine_dtype": FP8}),
)


def check_nodes(check: Check) -> None:
    columns = ["node of each rank", "case", "rounds", "forward and backward"]
    rows = check.begin("Two levels", columns, "bit for bit; weight gradients within 1e-4")
    rounds = 1 if check.quick else ROUNDS
    for topology in NODES[:1] if check.quick else NODES:
        for case in CASES_ON_NODES[:1] if check.quick else CASES_ON_NODES:
            with check.part(f"{case.name}, {topology}"):
                seconds = min(CASE_S, check.seconds)
                run_case(check.device, topology.num_ranks, case, rounds, seconds=seconds, topology=topology)
                rows.append([str(topology.nodes), case.name, rounds, "equal"])
    check.say(f"{len(rows)} cases equal, {len(check.failures)} not; gets and puts were copies")


CHAIN_SIZE, PAIRS, QUICK_PAIRS = 3, 2000, 200
CHECK_EVERY = 50  # bounds the queued launches to what a stream takes without making the host wait


def check_chains(check: Check) -> None:
    pairs = QUICK_PAIRS if check.quick else PAIRS
    begin = time.monotonic()
    run_chain(check.device, pairs, seconds=check.seconds)
    check.say(f"{pairs} pairs, every {CHECK_EVERY}th output equal, {time.monotonic() - begin:.1f} s")


def run_chain(device: Any, pairs: int, *, seconds: float) -> None:
    """Run the pairs. All inputs are on the device before the first pair, because copying them would drain the
    stream."""
    spec = make_spec(CHAIN_SIZE)
    draw = random.Random(7)
    tokens = [[draw.choice([0, 1, 5, 12]) for _ in range(CHAIN_SIZE)] for _ in range(pairs)]
    drawn = [make_inputs(spec, [12] * CHAIN_SIZE, 10_000 + i) for i in range(min(pairs, 2 * CHECK_EVERY))]
    checked = {i for i in range(pairs) if i % CHECK_EVERY == CHECK_EVERY - 1} | {pairs - 1}
    expected = {i: expect_forward(spec, _cut(drawn[i % len(drawn)], tokens[i]))[2] for i in checked}

    def work(group: ThreadGroup) -> None:
        rank, where, pace = group.rank, torch_device(device), random.Random(group.rank)
        inputs = [[t[rank].to(where) for t in (i.xs, i.topk_idx, i.topk_weights)] for i in drawn]
        with Buffer(group, timeout_s=seconds / 3, **buffer_kwargs(spec)) as buffer, torch.no_grad():
            for i in range(pairs):
                x, idx, weights = (t[: tokens[i][rank]] for t in inputs[i % len(inputs)])
                recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights, tag=i)
                out = buffer.combine(experts(recv_x, rank), recv_weights, handle)
                if i in checked:
                    check_bits(f"pair {i} on rank {rank}", out, expected[i][rank])
                if pace.random() < 0.02:
                    time.sleep(pace.random() * 0.01)
            buffer.check()

    ThreadRanks(CHAIN_SIZE, device).run(work, seconds=seconds)


def _cut(inputs: Inputs, num_tokens: list[int]) -> Inputs:
    lists = (inputs.xs, inputs.topk_idx, inputs.topk_weights)
    return Inputs(*([t[:n] for t, n in zip(ts, num_tokens, strict=True)] for ts in lists))
