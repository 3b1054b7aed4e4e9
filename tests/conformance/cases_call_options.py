"""Rank functions for tests of the options of a single call."""

from __future__ import annotations

from typing import Any

import torch
from support.ranks import meet
from support.rounds import CPU, expected_once
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer
from moe_rt.config.spec import BufferSpec
from moe_rt.lab.testing.rounds import Inputs, check_bits, expect_forward, play


def open_buffer(group: Any, spec: BufferSpec, **more: Any) -> Buffer:
    return Buffer(group, timeout_s=60.0, **buffer_kwargs(spec), **more)


def size_of(group: Any) -> int:
    return group.size if isinstance(group.size, int) else group.size()


def mine(inputs: Inputs, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank]


def bounded_rounds(group: Any, spec: BufferSpec, bounds: list[int | None], full: bool = False) -> None:
    with open_buffer(group, spec) as buffer:
        for turn, bound in enumerate(bounds):
            most = bound or spec.num_max_tokens_per_rank
            tokens = [most if full or r == 0 else (most * r) // 2 % (most + 1) for r in range(spec.num_ranks)]
            inputs = make_inputs(spec, tokens, turn, "topk" if full else "random")
            expected = expected_once(spec, inputs, turn, bound)
            play(buffer, inputs, expected, CPU, turn, max_tokens=bound, rows_to_spare=turn)


def handles_of_several_bounds(group: Any, spec: BufferSpec) -> None:
    """Dispatch with different bounds, and combine afterwards, with gradients."""
    bounds = [12, 3, None, 7]
    with open_buffer(group, spec) as buffer:
        rank, held = buffer.rank, []
        for seed, bound in enumerate(bounds):
            inputs = make_inputs(spec, [min(3, bound or 12)] * spec.num_ranks, seed)
            x, idx, weights = mine(inputs, rank)
            x.requires_grad_()
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights, max_tokens=bound)
            assert len(recv_x) == spec.capacity(rank, bound)
            held.append((inputs, x, recv_x, recv_weights, handle))
        for inputs, x, recv_x, recv_weights, handle in held:
            out = buffer.combine(recv_x, recv_weights, handle)
            sent = [inputs.topk_weights[rank], inputs.topk_idx[rank] >= 0]
            want = (sent[0] * sent[1]).sum(1, keepdim=True)
            torch.testing.assert_close(out, want * x)
            out.sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, want.expand_as(x))


def disagreeing(group: Any, faulty_rank: int) -> str:
    spec = make_spec(size_of(group))
    with open_buffer(group, spec) as buffer:
        given = mine(make_inputs(spec, [3] * spec.num_ranks, 1), buffer.rank)
        try:
            buffer.dispatch(*given, max_tokens=5 if buffer.rank == faulty_rank else 4)
            buffer.check()  # kernels report errors here, after the op
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def refused_dispatch(group: Any, faulty_rank: int, bound: Any, num_tokens: int) -> str:
    """Only the faulty rank has this bound and these tokens; the group continues."""
    spec = make_spec(size_of(group))
    with open_buffer(group, spec) as buffer:
        faulty = buffer.rank == faulty_rank
        given = mine(make_inputs(spec, [num_tokens if faulty else 2] * spec.num_ranks, 1), buffer.rank)
        text = "no error"
        try:
            buffer.dispatch(*given, max_tokens=bound if faulty else 4)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        buffer.combine(*buffer.dispatch(*mine(make_inputs(spec, [2] * spec.num_ranks, 1), buffer.rank)))
        return text


def overflowing(group: Any, policy: Any, placement: list[int]) -> str | list[int]:
    """Send every token to expert 0; return the error, or the capacity for this bound and for all tokens."""
    spec = make_spec(3, capacity_factor=0.4, overflow=policy, placement=placement)
    inputs = make_inputs(spec, [4] * 3, 1, "one_expert")
    with open_buffer(group, spec) as buffer:
        given = mine(inputs, buffer.rank)
        assert len(buffer.dispatch(*given)[0]) == buffer.capacity, "there is room for so few of so many"
        try:
            recv_x, recv_weights, handle = buffer.dispatch(*given, max_tokens=4)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        out = buffer.combine(recv_x, recv_weights, handle)
        check_bits("out", out, inputs.topk_weights[buffer.rank][:, :1] * inputs.xs[buffer.rank])
        return [len(recv_x), len(buffer.dispatch(*given, max_tokens=4)[0]), buffer.capacity]


def ids_as_they_lie(group: Any, idx_dtype: torch.dtype) -> None:
    """Ids of either width are accepted, also in a view that begins at an odd address."""
    spec = make_spec(size_of(group))
    inputs = make_inputs(spec, [12, 0, 7], 3)
    expected = expected_once(spec, inputs, 3)
    for rank, idx in enumerate(inputs.topk_idx):
        memory = torch.full((idx.numel() + 1,), 99, dtype=idx_dtype)
        memory[1:] = idx.flatten()
        inputs.topk_idx[rank] = memory[1:].view_as(idx)
    with open_buffer(group, spec) as buffer:
        play(buffer, inputs, expected, CPU)


def fewer_rows(group: Any, rows_to_spare: int, num_threads: int) -> None:
    spec = make_spec(size_of(group), dtype=torch.bfloat16)
    with open_buffer(group, spec, num_threads=num_threads) as buffer:
        for seed, tokens in enumerate(([12, 0, 7], [0, 0, 0], [1, 12, 12])):
            inputs = make_inputs(spec, tokens, seed)
            play(buffer, inputs, expected_once(spec, inputs, seed), CPU, rows_to_spare=rows_to_spare)


def too_few_rows(group: Any, faulty_rank: int, op: str, fault_continues: bool) -> str:
    """The faulty rank omits its last row: each rank received 12 rows, of 4 tokens from each of 3 ranks."""
    spec = make_spec(size_of(group))
    with open_buffer(group, spec) as buffer:
        x = torch.randn(4, spec.hidden)
        idx = torch.tensor([[3 * r + t % 3 for r in range(3)] for t in range(4)])
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(4, 3))
        rows = recv_x[: 11 if buffer.rank == faulty_rank else 12]
        engine, plans = buffer._engine, (handle.recv_plan, handle.send_plan)
        meet(group)
        text = "no error"
        try:
            if op == "combine":
                buffer.combine(rows, recv_weights, handle)
            elif op == "combine_backward":
                engine.combine_backward(x, rows, recv_weights, handle.recv_plan, 0)
            else:
                engine.dispatch_backward(rows, recv_weights, *plans, 0)
            buffer.check()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        if fault_continues:
            torch.testing.assert_close(buffer.combine(recv_x, recv_weights, handle), 3 * x)
        return text


def outs(group: Any) -> None:
    """Combine into the caller's memory at any address, also over y and over the weights; each call counts as a change
    of it."""
    spec = make_spec(size_of(group), hidden=5)
    inputs = make_inputs(spec, [12, 9], 3)
    received, ys, wanted = expect_forward(spec, inputs)
    with open_buffer(group, spec, num_threads=2) as buffer:
        rank = buffer.rank
        want, weights = wanted[rank], received[rank].recv_weights
        recv_x, recv_weights, handle = buffer.dispatch(*mine(inputs, rank))
        n = len(ys[rank])
        for at in range(4):
            memory = torch.zeros(want.numel() + 8)
            out = memory[at : at + want.numel()].view_as(want)
            version = out._version
            recv_x[:n] = ys[rank]
            with torch.no_grad():
                assert buffer.combine(recv_x, recv_weights, handle, out=out) is out
            check_bits("out", out, want)
            assert out._version > version
            assert torch.equal(memory.count_nonzero(), want.count_nonzero()), "nothing beside it"
            y = torch.zeros(n + 30, 5)
            y[at : at + n] = ys[rank]
            over = y[: len(want)]
            with torch.no_grad():
                buffer.combine(y[at : at + n], recv_weights, handle, out=over)
            check_bits("out over y", over, want)
            memory = torch.zeros(max(recv_weights.numel(), want.numel()) + 8)
            memory[: recv_weights.numel()] = recv_weights
            over = memory[at : at + want.numel()].view_as(want)
            with torch.inference_mode():
                buffer.combine(recv_x, memory[: recv_weights.numel()], handle, out=over)
            check_bits("out over weights", over, want)
        assert torch.equal(recv_weights[:n], weights)
        check_bits("out", buffer.combine(recv_x, recv_weights, handle), want)
