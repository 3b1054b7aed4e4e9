"""Ranks run ops while one of them rewrites the lists of all: every op returns, or raises a MoeRtError."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import torch
from fuzz.rewriter import Rewriter
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer
from moe_rt.errors import MoeRtError
from moe_rt.group.groups import rendezvous_of

OPS = 12  # of each kind, in a buffer whose group has not ended
MEETING_S = 600.0  # for hangs only
TIMEOUT_S, TIMEOUT_OF_CONTROL_S = 5.0, 0.3


def rewritten(group: Any, seed: int, num_buffers: int, size: int, control: bool, fixed: dict[str, Any]) -> Counter[str]:
    """Return how the ops of `num_buffers` buffers ended, by name, and the number of rewritten words."""
    ends: Counter[str] = Counter()
    for number in range(num_buffers):
        choose = random.Random(f"{seed} {number}")  # identical on all ranks
        rank = rendezvous_of(group).rank
        spec = make_spec(size, **{**chosen(choose), **fixed})
        timeout_s = TIMEOUT_OF_CONTROL_S if control else TIMEOUT_S
        threads, rewrites = choose.randint(1, 3), choose.randrange(size)
        with _made(group, timeout_s=timeout_s, num_threads=threads, **buffer_kwargs(spec)) as buffer:
            rewriter = Rewriter(buffer, choose.randrange(1 << 32), control)
            with rewriter if rank == rewrites else contextlib.nullcontext():
                _work(buffer, choose, rank, ends)
            rendezvous_of(group).all_gather("", MEETING_S)  # no rank writes to a freed segment
        ends["words rewritten"] += rewriter.num_words
    return ends


def chosen(choose: random.Random) -> dict[str, Any]:
    """Draw a buffer's options that decide which lists exist, and which ranks follow them."""
    by_token = choose.random() < 0.4
    tokens = choose.choice((1, 2, 16, 64))
    return {
        "num_max_tokens_per_rank": tokens,
        "num_experts": choose.choice((6, 9, 300)),
        "num_topk": choose.choice((1, 2, 3, 6)),
        "hidden": choose.choice((16, 20)),
        "layout": "tokens" if by_token else "experts",
        "expert_alignment": 1 if by_token else choose.choice((1, 8)),
        "overflow": choose.choice(("raise", "drop", "retry")),
        "capacity_factor": choose.choice((None, 0.5, 1.5)),
        "sums": "ranked" if by_token else choose.choice(("ranked", "invariant")),
    }


@contextlib.contextmanager
def _made(group: Any, **options: Any) -> Any:
    """Yield a buffer, and close it at the end in any state."""
    buffer = Buffer(group, **options)
    try:
        yield buffer
    finally:
        with contextlib.suppress(MoeRtError):
            buffer.close()


def _work(buffer: Buffer, choose: random.Random, rank: int, ends: Counter[str]) -> None:
    """Dispatch and combine, with or without gradients, until the group has ended or `OPS` are done."""
    spec = buffer.spec
    num_tokens = [choose.randint(0, spec.num_max_tokens_per_rank) for _ in range(spec.num_ranks)]
    inputs = make_inputs(spec, num_tokens, choose.randrange(1 << 32))
    x, idx, weights = inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank]
    for _ in range(OPS):
        with_gradients = choose.random() < 0.5
        try:
            rows = x.clone().requires_grad_(with_gradients)
            recv_x, recv_weights, handle = buffer.dispatch(rows, idx, weights)
            out = buffer.combine(recv_x, None if spec.by_token else recv_weights, handle)
            if with_gradients:
                out.backward(torch.ones_like(out))
            ends["round"] += 1
        except MoeRtError as error:
            ends[type(error).__name__] += 1
            if not is_refusal(error):
                return


def is_refusal(error: MoeRtError) -> bool:
    """True if the buffer continues after this error; on a GPU the next op reports it instead."""
    return type(error).__name__ in ("CapacityOverflow", "InvalidInput", "InvalidRouting", "TooManyTokens")
