"""Bits at sizes of large models, against torch on the same GPU, and of every way in which rows reach shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.check.correctness import CASE_S, TIMEOUT_S, Case, run_case
from moe_rt.lab.check.measuring import Load
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import WrongOutput, buffer_kwargs, check_bits, expect, make_inputs, make_spec, read

NOT_EARLY = "MOE_RT_DEPENDENT_LAUNCHES"
SMOKE = (
    (1, Case("fp32", most=4)),
    (1, Case("bf16", changes={"dtype": torch.bfloat16})),
    (2, Case("fp32", most=4)),
    (8, Case("bf16", changes={"dtype": torch.bfloat16})),
)


def check_smoke(check: Check) -> None:
    """Run the smallest rounds. If the first one fails, try it without launches that begin early."""
    rows = check.begin("Smoke", ["ranks", "round", "forward and backward"])
    for size, case in SMOKE:
        if size > max(check.sizes or ((2,) if check.quick else (8,))):
            continue
        with check.part(f"{case.name}, {size} ranks"):
            run_case(check.device, size, case, seconds=CASE_S)
            rows.append([size, case.name, "equal"])
    if not rows:
        with check.part("without early launches"):
            before, os.environ[NOT_EARLY] = os.environ.get(NOT_EARLY), "0"
            try:
                run_case(check.device, *SMOKE[0], seconds=CASE_S)
            finally:
                del os.environ[NOT_EARLY]
                os.environ |= {} if before is None else {NOT_EARLY: before}
            check.say(f"a round is right with {NOT_EARLY}=0 only")
    check.say(f"{len(rows)} rounds equal")


# Ranks and tokens of each, the most telling first; H = 7168 and K = 8 as in DeepSeek-V3, E = 256.
LOADS = ((8, 128), (8, 1), (8, 4096), (1, 4096), (8, 64), (2, 512), (4, 2048), (1, 1))
QUICK_LOADS = ((2, 8), (1, 4))
HIDDEN, TOPK, EXPERTS = 7168, 8, 256
MANY, FEW = 200, 2  # tokens: more than blocks, and so few that an op is one launch
ROWS_IN_RINGS = 512  # least tokens of one rank for which rows are also moved through rings
RING_SMS = 8


def check(check: Check) -> None:
    """Compare whole rounds at each load, then each transport at a small one."""
    rows = check.begin("Bits at scale", ["ranks", "tokens", "through", "rows", "result"])
    loads = QUICK_LOADS if check.quick else LOADS
    for size, tokens in [load for load in loads if load[0] in (check.sizes or (1, 2, 4, 8))]:
        for num_sms in (None, RING_SMS) if size == 1 and tokens >= ROWS_IN_RINGS else (None,):
            with check.part(f"{size} ranks, {tokens} tokens, num_sms {num_sms}"):
                load = Load(size, tokens, HIDDEN, TOPK, EXPERTS, num_sms=num_sms)
                moved = compare_with_torch(check.device, load, seconds=CASE_S)
                rows.append([size, tokens, "rings" if num_sms else "registers", moved, "equal"])
    for size in check.sizes or (1, 2):
        for case in transports(check.quick):
            with check.part(f"{case.name}, {size} ranks"):
                run_case(check.device, size, case, 1 if check.quick else 3, seconds=CASE_S)
                rows.append([size, case.most, case.name, "", "equal"])
        with check.part(f"token windows, {size} ranks"):
            from_token_windows(check.device, size)
            rows.append([size, MANY, "token windows", "", "equal"])
    check.say(f"{len(rows)} comparisons equal, {len(check.failures)} not")


def transports(quick: bool) -> list[Case]:
    """Cases for whole ops in one launch, for rings and for more tokens than blocks."""
    whole, rings = {"num_max_tokens_per_rank": FEW}, {"num_sms": RING_SMS}
    many = {"num_max_tokens_per_rank": MANY}
    found = [Case("whole ops", most=FEW, idle=False, changes=whole), Case("rings", changes=rings)]
    if quick:
        return found
    large = {"hidden": HIDDEN, "num_topk": TOPK, "num_experts": 16, "dtype": torch.bfloat16}
    return [
        *found,
        Case("whole ops, large rows", "topk", FEW, False, large | whole),
        Case("rings, large rows", "topk", changes=large | rings),
        Case("rings, many tokens", "topk", MANY, False, large | rings | many),
        Case("many tokens, large rows", "topk", MANY, False, large | many),
    ]


def from_token_windows(device: Any, size: int) -> None:
    """Dispatch rows that were written into the rank's own window.

    Raises:
        WrongOutput: a received row differs from the reference.
    """
    spec, where = make_spec(size, num_max_tokens_per_rank=MANY), torch_device(device)
    inputs = [make_inputs(spec, [MANY - 50] * size, 100 + turn) for turn in range(3)]
    turns = [(given, expect(spec, given, turn).received) for turn, given in enumerate(inputs)]

    def work(group: ThreadGroup) -> None:
        rank = group.rank
        with Buffer(group, timeout_s=TIMEOUT_S, **buffer_kwargs(spec)) as buffer, torch.no_grad():
            for given, received in turns:
                x, idx, weights = (t[rank].to(where) for t in (given.xs, given.topk_idx, given.topk_weights))
                window = buffer.token_window(len(x))
                window.copy_(x)
                recv_x, recv_weights, handle = buffer.dispatch(window, idx, weights)
                mine = received[rank].recv_x
                check_bits("recv_x of a token window", recv_x[: len(mine)], mine)
                buffer.combine(recv_x, recv_weights, handle)
            buffer.check()

    ThreadRanks(size, device).run(work, seconds=CASE_S)


@dataclass(frozen=True)
class Drawn:
    """Inputs of all ranks on the device, lists over ranks. Each rank has an equal contiguous block of experts."""

    xs: list[Tensor]
    idx: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def of(cls, load: Load, seed: int, device: torch.device) -> Drawn:
        g = torch.Generator(device).manual_seed(seed)
        ranks = range(load.ranks)
        xs = [torch.randn(load.tokens, load.hidden, generator=g, device=device).bfloat16() for _ in ranks]
        top = [torch.rand(load.tokens, load.experts, generator=g, device=device).topk(load.topk) for _ in ranks]
        return cls(xs, [t.indices for t in top], [t.values for t in top])


def compare_with_torch(device: Any, load: Load, *, seconds: float) -> int:
    """Dispatch and combine three times, in both windows, and compare every row with torch's on the same device.

    Returns:
        Rows that all ranks received in a turn.

    Raises:
        WrongOutput: names the tensor and the first element that differs.
    """
    where = torch_device(device)
    drawn = [Drawn.of(load, seed, where) for seed in (1, 2)]
    rows = [received_rows(d, load) for d in drawn]
    outs = [[combined(d, rank, load) for rank in range(load.ranks)] for d in drawn]
    everything = [torch.cat(d.xs) for d in drawn]
    kwargs = load.buffer_kwargs() | {"timeout_s": TIMEOUT_S}

    def work(group: ThreadGroup) -> None:
        rank = group.rank
        with Buffer(group, **kwargs) as buffer, torch.no_grad():
            for turn in (0, 1, 0):
                given, (tokens, ends) = drawn[turn], rows[turn][rank]
                recv_x, recv_weights, handle = buffer.dispatch(given.xs[rank], given.idx[rank], given.weights[rank])
                out = buffer.combine(recv_x, recv_weights, handle)
                check_bits(f"turn {turn}, rank {rank}: offs", handle.offs, ends)
                check_bits(f"turn {turn}, rank {rank}: recv_x", recv_x[: len(tokens)], everything[turn][tokens])
                check_bits(f"turn {turn}, rank {rank}: out", out, outs[turn][rank])
            buffer.check()
            if dropped := int(read(handle.num_dropped)):
                raise WrongOutput(f"rank {rank}: got {dropped} dropped rows, expected capacity for all")

    ThreadRanks(load.ranks, device, reserve_bytes=4 * load.capacity_bytes()).run(work, seconds=seconds)
    return sum(len(tokens) for tokens, _ in rows[0])


def received_rows(drawn: Drawn, load: Load) -> list[tuple[Tensor, Tensor]]:
    """Return for each rank the token, numbered through all ranks, of each row that it receives, and offs."""
    idx, per_rank = torch.cat(drawn.idx), load.experts // load.ranks
    experts = idx.flatten()
    tokens = torch.arange(len(idx), device=idx.device).repeat_interleave(load.topk)
    order = (experts * len(idx) + tokens).argsort()
    experts, tokens = experts[order], tokens[order]
    found = []
    for rank in range(load.ranks):
        mine = experts // per_rank == rank
        counts = torch.bincount(experts[mine] - rank * per_rank, minlength=per_rank)
        found.append((tokens[mine], counts.cumsum(0).int()))
    return found


def combined(drawn: Drawn, rank: int, load: Load) -> Tensor:
    """Return combine's output if experts return their rows: each rank's sum in fp32 in the order of its experts,
    rounded to bf16, and these added in the order of ranks."""
    x, per_rank = drawn.xs[rank].float(), load.experts // load.ranks
    idx, order = drawn.idx[rank].sort(dim=1)
    weights = drawn.weights[rank].gather(1, order)
    out = torch.zeros_like(x)
    for owner in range(load.ranks):
        partial = torch.zeros_like(x)
        for k in range(load.topk):
            factor = torch.where(idx[:, k] // per_rank == owner, weights[:, k], 0.0)
            partial = partial + factor[:, None] * x
        out = out + partial.bfloat16().float()
    return out.bfloat16()
