"""Rank functions for tests of token windows: rows that their producer wrote where peers read them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from conformance.cases_call_options import mine, open_buffer, size_of
from support.ranks import meet
from support.routing import make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.config.spec import BufferSpec
from moe_rt.lab.testing.rounds import Inputs, check_bits
from moe_rt.ops import reference


def written(buffer: Buffer, x: Tensor) -> Tensor:
    """Return the next op's window, with these rows in it."""
    return buffer.token_window(len(x)).copy_(x)


def check_round(buffer: Buffer, inputs: Inputs, x: Tensor, spec: BufferSpec | None = None) -> None:
    """Dispatch x, this rank's rows, and combine; compare with the oracle of this spec."""
    rank, spec = buffer.rank, spec or buffer.spec
    recv_x, recv_weights, handle = buffer.dispatch(x, inputs.topk_idx[rank], inputs.topk_weights[rank])
    received = reference.dispatch(inputs.xs, inputs.topk_idx, inputs.topk_weights, spec)
    n = len(received[rank].recv_x)
    check_bits("recv_x", recv_x[:n], received[rank].recv_x)
    check_bits("recv_weights", recv_weights[:n], received[rank].recv_weights)
    out = buffer.combine(recv_x, recv_weights, handle)
    factors, rows = [r.recv_weights for r in received], [r.recv_x for r in received]
    outs = reference.combine(rows, factors, received, inputs.num_tokens, spec, spec.combine_dtype)
    check_bits("out", out, outs[rank])


def rounds_from_windows(group: Any, spec: BufferSpec, num_tokens: list[int], odd_rank: int = -1) -> None:
    """Run rounds from windows; rank `odd_rank` passes rows in ordinary memory."""
    with open_buffer(group, spec) as buffer, torch.no_grad():
        for seed in range(4):
            inputs = make_inputs(spec, num_tokens, seed)
            x = inputs.xs[buffer.rank]
            check_round(buffer, inputs, x if buffer.rank == odd_rank else written(buffer, x))


def free_run(group: Any, ops: int) -> None:
    """Run one to three dispatches in a row from windows, then their combines, without a drain between them."""
    size = size_of(group)
    spec = make_spec(size, hidden=20)
    plan = random.Random(1)  # identical on all ranks
    with open_buffer(group, spec) as buffer, torch.no_grad():
        pace = random.Random(buffer.rank)
        for i in range(ops):
            held = []
            for d in range(plan.choice([1, 1, 2, 3])):
                num_tokens = pace.choice([1, 5, 12])
                x = torch.full((num_tokens, 20), float(buffer.rank * 64 + (3 * i + d) % 64))
                ids = [[(t + i + 3 * k) % 9 for k in range(3)] for t in range(num_tokens)]
                window = buffer.token_window(num_tokens)
                if pace.random() < 0.1:
                    time.sleep(pace.random() * 0.005)
                window.copy_(x)
                held.append((x, buffer.dispatch(window, torch.tensor(ids), torch.ones(num_tokens, 3))))
            for x, (recv_x, recv_weights, handle) in held:
                assert torch.equal(buffer.combine(recv_x, recv_weights, handle), 3.0 * x), f"turn {i}"


def given(buffer: Buffer, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return mine(make_inputs(buffer.spec, [7] * buffer.num_ranks, seed), buffer.rank)


def after_a_combine(buffer: Buffer) -> Tensor:
    x, idx, weights = given(buffer)
    dispatched = buffer.dispatch(x, idx, weights)
    window = written(buffer, x)
    buffer.combine(*dispatched)
    return window


def after_its_dispatch(buffer: Buffer) -> Tensor:
    x, idx, weights = given(buffer)
    window = written(buffer, x)
    buffer.dispatch(window, idx, weights)
    return window


def after_two_dispatches(buffer: Buffer) -> Tensor:
    """Return an old window whose memory is the next dispatch's again."""
    window = after_its_dispatch(buffer)
    buffer.dispatch(*given(buffer))
    return window


def not_from_the_start(buffer: Buffer) -> Tensor:
    for _ in range(2):
        buffer.combine(*buffer.dispatch(*given(buffer)))
    return buffer.token_window(8)[1:]


def every_other_row(buffer: Buffer) -> Tensor:
    for _ in range(2):
        buffer.combine(*buffer.dispatch(*given(buffer)))
    return buffer.token_window(12)[::2]


NOT_FOR_NOW: dict[str, Callable[[Buffer], Tensor]] = {
    f.__name__: f
    for f in (after_a_combine, after_its_dispatch, after_two_dispatches, not_from_the_start, every_other_row)
}


def refused_window(group: Any, name: str) -> str:
    """Rank 1 dispatches such a tensor, the other ranks ordinary rows; CPU ranks continue."""
    with open_buffer(group, make_spec(size_of(group), hidden=20)) as buffer, torch.no_grad():
        window = NOT_FOR_NOW[name](buffer)
        rows = window if buffer.rank == 1 else torch.ones(len(window), 20)
        text = "no error"
        meet(group)
        try:
            buffer.dispatch(rows, *given(buffer)[1:]) if len(rows) == 7 else buffer.dispatch(
                rows, torch.zeros(len(rows), 3, dtype=torch.int64), torch.ones(len(rows), 3)
            )
            buffer.check()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        if buffer.heap != "loopback":
            inputs = make_inputs(buffer.spec, [7] * buffer.num_ranks, 9)
            check_round(buffer, inputs, written(buffer, inputs.xs[buffer.rank]))
        return text


def retried(group: Any, hidden: int) -> None:
    """The first dispatch overflows; the retry takes the other window, with the rows of the first."""
    spec = make_spec(size_of(group), hidden=hidden, capacity_factor=0.4, overflow="retry")
    with open_buffer(group, spec) as buffer, torch.no_grad():
        inputs = make_inputs(spec, [12] * spec.num_ranks, 3, "one_expert")
        roomy = make_spec(spec.num_ranks, hidden=hidden)
        check_round(buffer, inputs, written(buffer, inputs.xs[buffer.rank]), roomy)


def kept_past_the_end(group: Any) -> float:
    """Memory outlives the buffer while a tensor uses it."""
    with open_buffer(group, make_spec(size_of(group))) as buffer:
        window = buffer.token_window(12)
    return float(window.fill_(2.0).sum())
