"""Rank functions for the bad-input tests; each returns what its rank saw."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from support.ranks import meet
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidRouting

TIMEOUT_S = 100.0


def open_buffer(group: Any, spec: BufferSpec | None = None, **more: Any) -> Buffer:
    rank_count = group.size if isinstance(group.size, int) else group.size()
    spec = spec or make_spec(rank_count)
    return Buffer(group, **{"timeout_s": TIMEOUT_S, **buffer_kwargs(spec), **more})


def good_round(buffer: Buffer) -> None:
    """Run a correct round, to prove that the group still works."""
    spec = buffer.spec
    inputs = make_inputs(spec, [spec.num_max_tokens_per_rank] * spec.num_ranks, 11, "topk")
    x, idx = inputs.xs[buffer.rank], inputs.topk_idx[buffer.rank]
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(idx.shape, dtype=spec.acc_dtype))
    out = buffer.combine(recv_x, recv_weights, handle)
    torch.testing.assert_close(out, x * spec.num_topk)


def await_wait(buffer: Buffer, op: str = "dispatch") -> None:
    """Return once this rank waits for its peers in an op of this kind, which another thread runs."""
    deadline = time.monotonic() + TIMEOUT_S
    while not any((each.op, each.phase) == (op, "wait") for each in buffer.report().ranks[buffer.rank].last_ops):
        if time.monotonic() > deadline:
            raise TimeoutError(f"got no wait in {op}")
        time.sleep(0.01)


def bad_dispatch(group: Any, faulty_rank: int, changes: dict[str, Any]) -> str:
    """Rank `faulty_rank` dispatches with some arguments replaced; return "<error class>: <message>" of this rank."""
    with open_buffer(group) as buffer:
        spec = buffer.spec
        args: dict[str, Any] = {
            "x": torch.randn(4, spec.hidden),
            "topk_idx": torch.zeros(4, spec.num_topk, dtype=torch.int64),
            "topk_weights": torch.ones(4, spec.num_topk),
        }
        if buffer.rank == faulty_rank:
            args |= changes
        text = "no error"
        try:
            buffer.dispatch(**args)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        good_round(buffer)  # a refusal leaves the group usable
        return text


def two_bad_dispatches(group: Any) -> tuple[str, int]:
    """Ranks 1 and 2 dispatch to experts 91 and 92, which do not exist. Return the error and the peer that it names."""
    with open_buffer(group) as buffer:
        spec, expert = buffer.spec, 90 + buffer.rank if buffer.rank else 0
        x, idx = torch.randn(4, spec.hidden), torch.full((4, spec.num_topk), expert)
        try:
            buffer.dispatch(x, idx, torch.ones(4, spec.num_topk))
        except InvalidRouting as error:
            return str(error), error.peer
    return "no error", -1


def bad_ids_of_threads(group: Any, bad: dict[int, int]) -> list[str]:
    """Rank 1, whose ops run on three threads, dispatches 12 tokens, some to experts that do not exist: `bad`, by token.
    Return the errors of a whole op and of halves."""
    with open_buffer(group, num_threads=3) as buffer:
        spec, texts = buffer.spec, []
        x, idx = torch.randn(12, spec.hidden), torch.zeros(12, spec.num_topk, dtype=torch.int64)
        if buffer.rank == 1:
            for token, expert in bad.items():
                idx[token, 1] = expert
        for wait in (True, False):
            try:
                pending: Any = buffer.dispatch(x, idx, torch.ones(idx.shape), wait=wait)
                if not wait:
                    pending.wait()
                texts.append("no error")
            except InvalidRouting as error:
                texts.append(str(error))
            good_round(buffer)
    return texts


def bad_combine(group: Any, faulty_rank: int, name: str, value: torch.Tensor) -> str:
    with open_buffer(group) as buffer:
        spec = buffer.spec
        x, idx = torch.randn(4, spec.hidden), torch.zeros(4, spec.num_topk, dtype=torch.int64)
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(4, spec.num_topk))
        args = {"y": recv_x, "recv_weights": recv_weights, "handle": handle}
        if buffer.rank == faulty_rank:
            args[name] = value
        text = "no error"
        try:
            buffer.combine(**args)  # type: ignore[arg-type]
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        good_round(buffer)
        return text


def accepts_views(group: Any) -> None:
    """Non-contiguous input, int32 ids and half-precision weights are accepted."""
    with open_buffer(group) as buffer:
        spec, n = buffer.spec, 4
        x = torch.randn(spec.hidden, n).t()
        idx = torch.zeros(spec.num_topk, n, dtype=torch.int32).t()
        weights = torch.ones(spec.num_topk, n, dtype=torch.bfloat16).t()
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        out = buffer.combine(recv_x.t().contiguous().t(), recv_weights, handle)
        torch.testing.assert_close(out, x * spec.num_topk)


def make_differing(group: Any, faulty_rank: int, changes: dict[str, Any]) -> str:
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    try:
        open_buffer(group, **(changes if rank == faulty_rank else {})).close()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def overflow(group: Any) -> str:
    spec = make_spec(group.size if isinstance(group.size, int) else group.size(), capacity_factor=0.5, num_topk=1)
    with open_buffer(group, spec) as buffer:
        x = torch.randn(12, spec.hidden)
        text = "no error"
        try:
            buffer.dispatch(x, torch.zeros(12, 1, dtype=torch.int64), torch.ones(12, 1))
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        idx = torch.full((12, 1), -1)
        buffer.dispatch(x, idx, torch.ones(12, 1))  # the group continues
        return text


def swapped_layers(group: Any, faulty_rank: int) -> str:
    with open_buffer(group) as buffer:
        tag = 2 if buffer.rank == faulty_rank else 1
        x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
        try:
            buffer.dispatch(x, idx, torch.ones(4, buffer.spec.num_topk), tag=tag)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def swapped_moe_layers(group: Any, faulty_rank: int) -> str:
    """Two equal layers share a buffer; the faulty rank runs the second one first."""
    config = MoEConfig(hidden=8, intermediate=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=4)
    first, second = MoELayer(config, group), MoELayer(config, group)
    try:
        layer = second if first.buffer.rank == faulty_rank else first
        assert first.buffer is second.buffer
        layer(torch.randn(4, 8))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        first.buffer.close()
    return "no error"


def skipped_op(group: Any, faulty_rank: int) -> str:
    """Every rank dispatches twice, but the faulty rank combines instead of the second dispatch."""
    with open_buffer(group) as buffer:
        x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
        weights = torch.ones(4, buffer.spec.num_topk)
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        try:
            if buffer.rank == faulty_rank:
                buffer.combine(recv_x, recv_weights, handle)
            else:
                buffer.dispatch(x, idx, weights)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def other_handle(group: Any, faulty_rank: int) -> str:
    with open_buffer(group) as buffer:
        x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
        weights = torch.ones(4, buffer.spec.num_topk)
        results = [buffer.dispatch(x, idx, weights) for _ in range(2)]
        try:
            buffer.combine(*results[0 if buffer.rank == faulty_rank else 1])
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def close_during_op(group: Any) -> str:
    """One thread waits in an op for the late rank 0 while another closes the buffer."""
    buffer = open_buffer(group)
    while buffer.rank == 0 and not buffer.report().ranks[1].closed:
        time.sleep(0.01)
    seen: list[str] = []

    def work() -> None:
        try:
            good_round(buffer)
        except RuntimeError as error:
            seen.append(type(error).__name__)

    thread = threading.Thread(target=work)
    thread.start()
    if buffer.rank == 1:
        await_wait(buffer)
        buffer.close()
    thread.join()
    return seen[0]


def use_after_close(group: Any) -> str:
    buffer = open_buffer(group)
    buffer.close()
    buffer.close()
    try:
        buffer.dispatch(torch.randn(0, buffer.spec.hidden), torch.zeros(0, 3, dtype=torch.int64), torch.ones(0, 3))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def two_threads(group: Any) -> list[str]:
    """While one thread waits in an op for the other rank, a second thread enters."""
    buffer = open_buffer(group)
    x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
    weights = torch.ones(4, buffer.spec.num_topk)
    if buffer.rank == 0:
        meet(group)
        good_round(buffer)
        return ["late"]
    first = threading.Thread(target=good_round, args=(buffer,))
    first.start()
    await_wait(buffer)
    try:
        buffer.dispatch(x, idx, weights)
        text = "no error"
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    meet(group)
    first.join()
    return [text]
