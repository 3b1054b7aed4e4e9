"""Rank functions for unusual but legal input; each checks its outputs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from faults.cases_faults import open_buffer
from support.rounds import one_round
from support.routing import make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.errors import CapacityOverflow

NAN = float("nan")


def pass_through(buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> list[Tensor]:
    """Return out, grad_x and grad_topk_weights of a dispatch and combine whose experts are the identity."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = buffer.combine(*buffer.dispatch(x, idx, weights))
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def one_value_not_finite(group: Any, where: str, value: float) -> None:
    """Put a non-finite value into one token of rank 0: only that token's output and gradients change."""
    with open_buffer(group) as buffer:
        inputs = make_inputs(buffer.spec, [12, 7, 12], seed=3, kind="random")
        x, idx, weights = (each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
        if buffer.rank == 0:
            idx[5] = torch.tensor([0, 4, 8])  # an expert of every rank
        before = pass_through(buffer, x, idx, weights)
        odd = x[5] if where == "row" else weights[5]
        if buffer.rank == 0:
            odd[1] = value
        after = pass_through(buffer, x, idx, weights)
        same = torch.ones(len(x), dtype=torch.bool)
        if buffer.rank == 0:
            same[5] = False
            assert not bool(after[0][5].isfinite().all())
        for name, a, b in zip(("out", "grad_x", "grad_topk_weights"), before, after, strict=True):
            assert torch.equal(a[same], b[same]), f"{name} of other tokens changed on rank {buffer.rank}"


def every_subset_without_tokens(group: Any) -> None:
    """Run forward and backward on one buffer for every subset of ranks without tokens; no op may be skipped on any
    rank."""
    with open_buffer(group) as buffer:
        for seed, tokens in enumerate(itertools.product([0, 5], repeat=buffer.num_ranks)):
            one_round(buffer, make_inputs(buffer.spec, list(tokens), seed, "random"), seed)


def around_capacity(group: Any) -> list[str]:
    """Rank 0 has capacity for six rows: five, six and seven arrive, then all fit again."""
    seen = []
    spec = make_spec(group.size if isinstance(group.size, int) else group.size(), capacity_factor=0.5, num_topk=1)
    with open_buffer(group, spec) as buffer:
        assert buffer.capacity == 6
        for rows in (5, 6, 7, 6):
            idx = torch.full((12, 1), -1)
            if buffer.rank == 1:
                idx[:rows] = 0
            x = torch.randn(12, spec.hidden)
            try:
                out = pass_through(buffer, x, idx, torch.ones(12, 1))[0]
                assert torch.equal(out, torch.where(idx == 0, x, 0.0))
                seen.append("fits")
            except CapacityOverflow:
                seen.append("overflow")
    return seen


def experts_up_and_down(group: Any) -> None:
    """Make buffers of one process for few, many and few experts, each while the previous one is alive."""
    size = group.size if isinstance(group.size, int) else group.size()
    previous: Buffer | None = None
    for seed, num_experts in enumerate((3, 24, 7, 3)):
        spec = make_spec(size, num_experts=num_experts)
        buffer = open_buffer(group, spec)
        for b in (buffer, previous or buffer, buffer):
            one_round(b, make_inputs(b.spec, [12] * size, seed, "random"), seed)
        if previous is not None:
            previous.close()
        previous = buffer
    assert previous is not None
    previous.close()


def overlapping_groups(group: Any) -> None:
    """Groups {0, 1} and {1, 2} run in step: rank 1's ops for one group must not wake or feed the other."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    mine = [i for i in range(2) if group.rank() in (i, i + 1)]
    spec = make_spec(2)
    buffers = {i: open_buffer(pairs[i], spec) for i in mine}
    for step in range(20):
        received = {}
        for i in mine:
            x = torch.full((12, spec.hidden), 100.0 * i + step)
            inputs = make_inputs(spec, [12, 12], step, "topk")
            received[i] = x, buffers[i].dispatch(x, inputs.topk_idx[buffers[i].rank], torch.ones(12, 3))
        for i in reversed(mine):
            x, results = received[i]
            assert torch.equal(buffers[i].combine(*results), 3 * x), f"step {step}, group {i}"
    for buffer in buffers.values():
        buffer.close()


def replayed(group: Any, steps: int) -> None:
    """Replay one buffer with changing counts, in recycled outputs that are full of NaN at first."""
    with open_buffer(group) as buffer:
        for step in range(steps):
            tokens = [(12, 1, 0)[(step + r) % 3] for r in range(buffer.num_ranks)]
            x = torch.randn(tokens[buffer.rank], buffer.spec.hidden)
            idx = make_inputs(buffer.spec, tokens, step, "topk").topk_idx[buffer.rank]
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(idx.shape))
            out = buffer.combine(recv_x, recv_weights, handle)
            torch.testing.assert_close(out, 3 * x)
            one_round(buffer, make_inputs(buffer.spec, tokens, step, "random"), step)
            recv_x.fill_(NAN), out.fill_(NAN)
