"""Rank functions for tests of rows with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from support.rounds import CPU, one_round
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.config.codec import RowFormat
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import MoeRtError
from moe_rt.lab.testing.rounds import Inputs, check_bits, make_scaled, play_scaled
from moe_rt.ops import reference

FP8 = torch.float8_e4m3fn
PLAIN = RowFormat(FP8, 20, torch.float32, 2)


def open_buffer(group: Any, spec: BufferSpec, **more: Any) -> Buffer:
    return Buffer(group, timeout_s=60.0, **buffer_kwargs(spec), **more)


def scaled_round(
    group: Any,
    spec: BufferSpec,
    row: RowFormat | None,
    num_tokens: list[int],
    seeds: list[int],
    kind: str = "random",
    num_threads: int = 1,
    max_tokens: int | None = None,
) -> list[bytes]:
    """Run a round for each seed on one buffer, which encodes the rows if `row` is None; return the outputs' bytes."""
    outputs: list[Tensor] = []
    with open_buffer(group, spec, num_threads=num_threads) as buffer:
        for seed in seeds:
            inputs = make_inputs(spec, num_tokens, seed, kind)
            sent = None if row is None else make_scaled(row, num_tokens, seed)
            outputs += play_scaled(buffer, inputs, sent, CPU, seed, max_tokens=max_tokens)
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in outputs]


def round_in_dirty_memory(group: Any, spec: BufferSpec, row: RowFormat, num_tokens: list[int]) -> None:
    """Run rounds in memory whose unwritten parts are NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        scaled_round(group, spec, row, num_tokens, [1, 2])
    finally:
        torch.use_deterministic_algorithms(False)


def turns(group: Any) -> None:
    """Dispatch plain rows, rows with scales of two formats, and plain rows again, in the same windows."""
    spec = make_spec(3, dtype=torch.bfloat16)
    with open_buffer(group, spec) as buffer:
        for seed in range(6):
            inputs = make_inputs(spec, [12, 0, 7], seed)
            row = [None, PLAIN, RowFormat(torch.uint8, 10, torch.uint8, 7)][seed % 3]
            if row is None:
                one_round(buffer, inputs, seed)
            else:
                play_scaled(buffer, inputs, make_scaled(row, inputs.num_tokens, seed), CPU, seed)


def mine(inputs: Inputs, rank: int) -> tuple[Tensor, Tensor]:
    return inputs.topk_idx[rank], inputs.topk_weights[rank]


def each_for_itself(group: Any) -> None:
    """Ranks 0 and 2 take the codes and rank 1 the decoded rows, as the bytes sent are the same."""
    spec = make_spec(3, hidden=300, dtype=torch.bfloat16, dispatch_dtype=FP8)
    inputs = make_inputs(spec, [12, 0, 7], 3)
    with open_buffer(group, spec) as buffer:
        x, routing = inputs.xs[buffer.rank], mine(inputs, buffer.rank)
        recv_x, recv_weights, handle = buffer.dispatch(x, *routing)
        n = int(handle.offs[-1])
        if buffer.rank == 1:
            again, weights, handle = buffer.dispatch(x, *routing)
        else:
            (codes, scales), weights, handle = buffer.dispatch(x, *routing, coded=True)
            again = (codes.float() * scales.repeat_interleave(128, 1)[:, :300]).bfloat16()
        check_bits("rows", again[:n], recv_x[:n])
        check_bits("weights", weights[:n], recv_weights[:n])
        buffer.combine(recv_x, weights, handle)


def as_they_lie(group: Any, spec: BufferSpec, row: RowFormat) -> None:
    """Pass column-major scales, as some products want them, codes at odd addresses, and rows of wider tensors."""
    inputs = make_inputs(spec, [12, 7], 3)
    sent = make_scaled(row, [12, 7], 4)
    odd = []
    for codes, scales in sent:
        memory = torch.zeros(codes.numel() + 1, dtype=torch.uint8)
        memory[1:] = codes.view(torch.uint8).flatten()
        odd.append((memory[1:].view(row.codes).view(codes.shape), scales.T.contiguous().T))
    wide = [
        (
            torch.cat([c.view(torch.uint8)] * 2, 1).view(row.codes)[:, : row.num_codes],
            torch.cat([s, s], 1)[:, -row.num_scales :],
        )
        for c, s in sent
    ]
    with open_buffer(group, spec) as buffer:
        for given in (odd, wide):
            play_scaled(buffer, inputs, given, CPU)


def retried(group: Any) -> int:
    """Return this rank's capacity after an overflow."""
    spec = make_spec(3, capacity_factor=0.1, overflow="retry", dtype=torch.bfloat16)
    inputs = make_inputs(spec, [12, 3, 7], 2)
    sent = make_scaled(PLAIN, inputs.num_tokens, 2)
    with open_buffer(group, spec) as buffer:
        (codes, scales), _, handle = buffer.dispatch(sent[buffer.rank], *mine(inputs, buffer.rank))
        n = int(handle.offs[-1])
        roomy = replace(spec, capacity_factor=None, overflow="raise")
    with open_buffer(group, roomy) as buffer:
        (want_codes, want_scales), _, _ = buffer.dispatch(sent[buffer.rank], *mine(inputs, buffer.rank))
        check_bits("codes", codes[:n], want_codes[:n])
        check_bits("scales", scales[:n], want_scales[:n])
    return len(codes)


def other_tags(group: Any) -> str:
    """Both ranks send rows with scales, with different layer tags."""
    spec = make_spec(2, dtype=torch.bfloat16)
    inputs = make_inputs(spec, [4, 4], 1)
    sent = make_scaled(PLAIN, [4, 4], 1)
    with open_buffer(group, spec) as buffer:
        rank = buffer.rank
        return outcome(buffer, lambda: buffer.dispatch(sent[rank], *mine(inputs, rank), tag=rank + 1))


def outcome(buffer: Buffer, act: Callable[[], Any]) -> str:
    """Return "<error class>: <message>", or "no error"."""
    try:
        act()
        buffer.check()  # kernels report errors here, after the op
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreeing(group: Any, faulty_rank: int, row: RowFormat | None, num_tokens: int) -> str:
    """The faulty rank has rows of another format, or plain rows."""
    spec = make_spec(3, dtype=torch.bfloat16)
    inputs = make_inputs(spec, [num_tokens] * 3, 1)
    with open_buffer(group, spec) as buffer:
        chosen = row if buffer.rank == faulty_rank else PLAIN
        rank = buffer.rank
        x: Any = inputs.xs[rank] if chosen is None else make_scaled(chosen, inputs.num_tokens, 1)[rank]
        return outcome(buffer, lambda: buffer.dispatch(x, *mine(inputs, rank)))


def wrong_x(fault: str) -> tuple[Any, bool]:
    """Return a wrong x in place of codes [4, 20] and scales [4, 2], and the value of coded=."""
    codes, scales = torch.zeros(4, 20, dtype=FP8), torch.ones(4, 2)
    faults: dict[str, Any] = {
        "codes of two bytes": (codes.bfloat16(), scales),
        "codes of another width": (codes[:, :19], scales),
        "half as many fp8": (codes[:, :10], scales),
        "codes of one dimension": (codes[0], scales),
        "scales of fp64": (codes, scales.double()),
        "scales of other tokens": (codes, scales[:3]),
        "scales of one dimension": (codes, scales[:, 0]),
        "no scales": (codes, scales[:, :0]),
        "nothing for scales": (codes, None),
        "a number for scales": (codes, 1.0),
        "three of them": (codes, scales, scales),
        "a list": [codes, scales],
        "too many bytes": (codes, torch.ones(4, 9)),
        "scales that train": (codes, scales.clone().requires_grad_()),
        "rows that train, coded": torch.zeros(4, 20, dtype=torch.bfloat16, requires_grad=True),
        "no codec": torch.zeros(4, 20, dtype=torch.bfloat16),
    }
    return faults[fault], fault in ("rows that train, coded", "no codec")


def refused(group: Any, faulty_rank: int, fault: str) -> str:
    """One rank's input is wrong; on CPU ranks the group continues."""
    codec = FP8 if fault == "rows that train, coded" else None
    spec = make_spec(3, dtype=torch.bfloat16, dispatch_dtype=codec)
    inputs = make_inputs(spec, [4] * 3, 1)
    sent = None if codec else make_scaled(PLAIN, [4] * 3, 1)
    with open_buffer(group, spec) as buffer:
        rank = buffer.rank
        wrong, coded = wrong_x(fault)
        x: Any = inputs.xs[rank] if sent is None else sent[rank]
        if rank == faulty_rank:
            x = wrong
        else:
            coded = sent is None
        text = outcome(buffer, lambda: buffer.dispatch(x, *mine(inputs, rank), coded=coded))
        if buffer.heap != "loopback":
            play_scaled(buffer, inputs, sent, CPU)
        return text


def window_bytes(group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return rank 0's rows of the window, and the codes and scales it sent."""
    row = RowFormat(FP8, 4096, torch.float32, 33)
    spec = make_spec(1, num_max_tokens_per_rank=5, hidden=4096, num_topk=1, num_experts=1, dtype=torch.bfloat16)
    codes, scales = make_scaled(row, [5], 1)[0]
    with open_buffer(group, spec) as buffer:
        segment = torch.frombuffer(buffer._engine._segments.mappings[0], dtype=torch.uint8)  # type: ignore[attr-defined]
        segment[4096:] = 0xA5  # all but control words
        buffer.dispatch((codes, scales), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
        start = next(at for at in range(4096, len(segment), 4096) if (segment[at : at + 4096] != 0xA5).sum() > 4000)
        return segment[start : start + 5 * 8192].view(5, 8192).clone(), codes, scales


def of_own_codec(codec: torch.dtype, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a single rank's rows as codes and scales: got, and expected."""
    sizes = {"num_max_tokens_per_rank": len(rows), "num_topk": 1, "num_experts": 1}
    with Buffer(None, hidden=rows.shape[1], dtype=rows.dtype, dispatch_dtype=codec, **sizes) as buffer:
        ones = torch.ones(len(rows), 1)
        (codes, scales), _, _ = buffer.dispatch(rows, torch.zeros(len(rows), 1, dtype=torch.int64), ones, coded=True)
    return codes, scales, *reference.code(rows, codec)
