"""What every rank does in a conformance case: run the real ops, compare with the whole group's reference."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from routing import Inputs, buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer, reference
from moe_rt.config import BufferSpec


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself and -0.0 is not 0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and a.contiguous().numpy(force=True).tobytes() == _bytes(b)


def _bytes(t: Tensor) -> bytes:
    return t.contiguous().numpy(force=True).tobytes()


def _bits(t: Tensor) -> Tensor:
    return t.view(torch.int16) if t.dtype is torch.bfloat16 else t


def check_equal(name: str, got: Tensor, expected: Tensor) -> None:
    assert bitwise_equal(_bits(got), _bits(expected)), f"{name}: got {got}, expected {expected}"


def experts(recv_x: Tensor, rank: int) -> Tensor:
    """Stand-in for the experts: an elementwise function that tells ranks apart."""
    return (recv_x * (rank + 1.5) - 0.25).to(recv_x.dtype)


def full_round(
    group: Any, spec: BufferSpec, num_tokens: list[int], seed: int, kind: str, num_threads: int = 1
) -> list[bytes]:
    """Forward and backward once; everything against the reference. Returns the outputs' bytes."""
    inputs = make_inputs(spec, num_tokens, seed, kind)
    with Buffer(group, num_threads=num_threads, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        return one_round(buffer, inputs, seed)


def one_round(buffer: Buffer, inputs: Inputs, seed: int, tag: int = 0) -> list[bytes]:
    spec, rank = buffer.spec, buffer.rank
    x = inputs.xs[rank].clone().requires_grad_()
    weights = inputs.topk_weights[rank].clone().requires_grad_()
    recv_x, recv_weights, handle = buffer.dispatch(x, inputs.topk_idx[rank], weights, tag=tag)

    received = reference.dispatch(inputs.xs, inputs.topk_idx, inputs.topk_weights, spec)
    mine = received[rank]
    n = len(mine.recv_x)
    check_equal("offs", handle.offs, mine.offs)
    check_equal("recv_x", recv_x[:n], mine.recv_x)
    check_equal("recv_weights", recv_weights[:n], mine.recv_weights)
    assert int(handle.num_dropped) == len(mine.rows) - n
    assert handle.num_recv_tokens_per_expert.sum() == n
    assert recv_x.shape == (buffer.capacity, spec.hidden)

    y = experts(recv_x, rank).detach().requires_grad_()
    w = recv_weights.detach().requires_grad_()
    out = buffer.combine(y, w, handle)
    ys = [experts(r.recv_x, i) for i, r in enumerate(received)]
    all_weights = [r.recv_weights for r in received]
    tokens = [len(t) for t in inputs.xs]
    check_equal("out", out, reference.combine(ys, all_weights, received, tokens, spec, spec.combine_dtype)[rank])

    g = torch.Generator().manual_seed(seed + 1)
    grad_outs = [torch.randn(t, spec.hidden, generator=g).to(spec.dtype) for t in tokens]
    grad_y, grad_w = torch.autograd.grad(out, [y, w], grad_outs[rank])
    expected = reference.combine_backward(grad_outs, ys, all_weights, received, spec)
    check_equal("grad_y", grad_y[:n], expected[rank][0])
    torch.testing.assert_close(grad_w[:n], expected[rank][1], rtol=1e-4, atol=1e-4)

    # The tail is poisoned: dispatch's backward must not read it.
    grad_y[n:], grad_w[n:] = float("nan"), float("nan")
    grad_x, grad_topk = torch.autograd.grad([recv_x, recv_weights], [x, weights], [grad_y, grad_w])
    all_grad_y = [e[0] for e in expected]
    expected_x, expected_topk = reference.dispatch_backward(
        all_grad_y, [e[1] for e in expected], received, inputs.topk_idx, spec
    )[rank]
    check_equal("grad_x", grad_x, expected_x)
    torch.testing.assert_close(grad_topk, expected_topk, rtol=1e-4, atol=1e-4)
    return [_bytes(_bits(t.detach())) for t in (recv_x[:n], recv_weights[:n], handle.offs, out, grad_x, grad_topk)]


def chain(group: Any, pairs: int) -> int:
    """Pairs of dispatch and combine without a drain between them, on three ranks; the last round in full."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    spec = make_spec(3, dtype=torch.bfloat16, hidden=64)
    pace = random.Random(rank)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        for i in range(pairs):
            num_tokens = pace.choice([0, 1, 5, 12])
            x = torch.full((num_tokens, spec.hidden), float(rank * 64 + i % 64), dtype=spec.dtype)
            idx = torch.tensor([[(t + i + 3 * k) % 9 for k in range(3)] for t in range(num_tokens)], dtype=torch.int64)
            idx = idx.reshape(-1, 3)
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, torch.ones(num_tokens, 3), tag=i)
            out = buffer.combine(recv_x, recv_weights, handle)
            assert torch.equal(out, (3.0 * x.float()).to(spec.dtype)), f"pair {i} on rank {rank}"
            if pace.random() < 0.02:
                time.sleep(pace.random() * 0.01)
        one_round(buffer, make_inputs(spec, [12, 0, 7], seed=5), seed=5)
    return pairs
