"""One round of rows with scales, of every rank of a group on any device, against the reference on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rt.comm import reference, reference_scaled
from moe_rt.comm.buffer import Buffer
from moe_rt.comm.handle import Handle
from moe_rt.config.row_format import RowFormat
from moe_rt.testing.rounds import Inputs, check, check_bits, check_close, check_placed, factors, padded, without


def make_scaled(row: RowFormat, num_tokens: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Draw codes and scales of every rank with arbitrary bits, including those of NaN."""
    g = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        bits = torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8, generator=g, device="cpu")
        return bits.view(dtype)

    return [(draw(n, row.num_codes, row.codes), draw(n, row.num_scales, row.scales)) for n in num_tokens]


def play_scaled(
    buffer: Buffer,
    inputs: Inputs,
    sent: list[tuple[Tensor, Tensor]] | None,
    device: torch.device,
    tag: int = 0,
    *,
    max_tokens: int | None = None,
) -> list[Tensor]:
    """Run this rank's part of a round: dispatch of `sent`, combine of the experts' rows, and combine's backward.

    Args:
        inputs: inputs with the routing. If `sent` is None, the buffer codes their rows, and delivers the codes.

    Returns:
        Outputs of the ops, real rows only: codes, scales, recv_weights, offs, out.

    Raises:
        WrongOutput: names the output that differs.
    """
    spec, rank = buffer.spec, buffer.rank
    routing = inputs.topk_idx[rank].to(device), inputs.topk_weights[rank].to(device)
    if sent is None:
        assert spec.dispatch_dtype is not None
        sent = [reference.code(x, spec.dispatch_dtype) for x in inputs.xs]
        x = inputs.xs[rank].to(device)
        (codes, scales), recv_weights, handle = buffer.dispatch(x, *routing, tag=tag, max_tokens=max_tokens, coded=True)
    else:
        given = (sent[rank][0].to(device), sent[rank][1].to(device))
        (codes, scales), recv_weights, handle = buffer.dispatch(given, *routing, tag=tag, max_tokens=max_tokens)

    received = reference_scaled.dispatch(sent, inputs.topk_idx, inputs.topk_weights, spec, max_tokens)
    mine = received[rank]
    assert mine.recv_scales is not None
    n = len(mine.recv_x)
    capacity = buffer.capacity if max_tokens is None else spec.capacity(rank, max_tokens)
    check(codes.shape == (capacity, *sent[rank][0].shape[1:]), f"codes: got {list(codes.shape)}")
    check(scales.shape == (capacity, *sent[rank][1].shape[1:]), f"scales: got {list(scales.shape)}")
    check_bits("codes", codes[:n], mine.recv_x)
    check_bits("scales", scales[:n], mine.recv_scales)
    check_placed(capacity, recv_weights, handle, mine)
    out = _play_combine(buffer, inputs, received, handle, capacity, tag)
    return [codes[:n], scales[:n], recv_weights[:n], handle.offs, out]


def _play_combine(
    buffer: Buffer,
    inputs: Inputs,
    received: list[reference.Received],
    handle: Handle,
    capacity: int,
    seed: int,
) -> Tensor:
    """Check a combine of rows in the buffer's dtype, and its backward."""
    spec, rank, device = buffer.spec, buffer.rank, handle.offs.device
    g = torch.Generator().manual_seed(seed)
    ys = [torch.randn(len(r.recv_x), spec.hidden, generator=g, device="cpu").to(spec.dtype) for r in received]
    grads = [torch.randn(x.shape, generator=g, device="cpu").to(spec.dtype) for x in inputs.xs]
    of_rows = factors(received, spec)
    outs = reference.combine(ys, of_rows, received, inputs.num_tokens, spec, spec.combine_dtype)
    backs = reference.combine_backward(grads, ys, of_rows, received, spec)
    mine, n = received[rank], len(ys[rank])
    y = padded(without(mine.padding, ys[rank]), n, device).requires_grad_()
    w = None if spec.by_token else padded(mine.recv_weights, capacity, device).requires_grad_()
    out = buffer.combine(y, w, handle)
    check_bits("out", out, outs[rank])
    grad_y, *grad_w = torch.autograd.grad(out, [y] if w is None else [y, w], grads[rank].to(device))
    check_bits("grad_y", grad_y, backs[rank][0])
    if grad_w:
        check_close("grad_recv_weights", grad_w[0][:n], backs[rank][1], spec.hidden)
    return out.detach()
