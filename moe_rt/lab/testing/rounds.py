"""One round, forward and backward, of every rank of a group on any device, against the reference on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.config.codec import RowFormat
from moe_rt.config.options import BufferOptions
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.ops import reference

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongOutput(AssertionError):
    """An output differs from the reference."""


@dataclass(frozen=True)
class Inputs:
    """One dispatch of a whole group, lists over ranks, on the CPU."""

    xs: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]

    @property
    def num_tokens(self) -> list[int]:
        return [len(x) for x in self.xs]


@dataclass(frozen=True)
class Expected:
    """Outputs that a round must give on every rank, lists over ranks."""

    received: list[reference.Received]
    ys: list[Tensor]
    outs: list[Tensor]
    grad_outs: list[Tensor]
    at_combine: list[tuple[Tensor, Tensor]]  # grad_y, grad_recv_weights (drawn for rows of tokens)
    at_dispatch: list[tuple[Tensor, Tensor]]  # grad_x, grad_topk_weights


def make_spec(num_ranks: int, **changes: Any) -> BufferSpec:
    """Return a small spec with some sizes or options changed."""
    fields: dict[str, Any] = {
        "num_max_tokens_per_rank": 12,
        "hidden": 20,
        "num_topk": 3,
        "num_experts": 9,
        "dtype": torch.float32,
    }
    sizes = {name: changes.pop(name, default) for name, default in fields.items()}
    sizes |= {"layout": changes.pop("layout", "experts"), "expert_alignment": changes.pop("expert_alignment", 1)}
    return BufferSpec.make(Topology.one_node(num_ranks), BufferOptions(**changes), **sizes)


def buffer_kwargs(spec: BufferSpec) -> dict[str, Any]:
    """Return the Buffer arguments that make this spec."""
    return spec.arguments()


def make_inputs(spec: BufferSpec, num_tokens: list[int], seed: int, kind: str = "random") -> Inputs:
    """Draw inputs: "random" ids with -1 and duplicates, "topk" distinct ids, "one_expert" all tokens to expert 0."""
    g = torch.Generator().manual_seed(seed)
    inputs = Inputs([], [], [])
    for n in num_tokens:
        inputs.xs.append(torch.randn(n, spec.hidden, generator=g, device="cpu").to(spec.dtype))
        if kind == "random":
            idx = torch.randint(-1, spec.num_experts, (n, spec.num_topk), generator=g, device="cpu")
        elif kind == "topk":
            idx = torch.rand(n, spec.num_experts, generator=g, device="cpu").topk(spec.num_topk).indices
        else:
            idx = torch.full((n, spec.num_topk), -1, device="cpu")
            idx[:, 0] = 0
        inputs.topk_idx.append(idx)
        inputs.topk_weights.append(torch.rand(n, spec.num_topk, generator=g, dtype=spec.acc_dtype, device="cpu"))
    return inputs


def experts(rows: Tensor, rank: int) -> Tensor:
    """Stand-in for the experts: elementwise, different on each rank, with the same bits on every device."""
    return (rows * (rank + 1.5) - 0.25).to(rows.dtype)


def expect(spec: BufferSpec, inputs: Inputs, seed: int, max_tokens: int | None = None) -> Expected:
    """Compute the whole group's round in plain torch; the output's gradients are drawn from `seed`."""
    received, ys, outs = expect_forward(spec, inputs, max_tokens)
    g = torch.Generator().manual_seed(seed + 1)
    grad_outs = [torch.randn(n, spec.hidden, generator=g, device="cpu").to(spec.dtype) for n in inputs.num_tokens]
    at_combine = reference.combine_backward(grad_outs, ys, reference.factors(received, spec), received, spec)
    if spec.by_token:
        drawn = [torch.randn(r.recv_weights.shape, generator=g, dtype=spec.acc_dtype) for r in received]
        at_combine = [(y, w) for (y, _), w in zip(at_combine, drawn, strict=True)]
    grad_ys, grad_ws = [y for y, _ in at_combine], [w for _, w in at_combine]
    at_dispatch = reference.dispatch_backward(grad_ys, grad_ws, received, inputs.topk_idx, spec)
    return Expected(received, ys, outs, grad_outs, at_combine, at_dispatch)


def expect_forward(
    spec: BufferSpec, inputs: Inputs, max_tokens: int | None = None
) -> tuple[list[reference.Received], list[Tensor], list[Tensor]]:
    """Return what every rank receives, what its experts compute from it, and every rank's output."""
    received = reference.dispatch(inputs.xs, inputs.topk_idx, inputs.topk_weights, spec, max_tokens)
    ys = [experts(r.recv_x, rank) for rank, r in enumerate(received)]
    outs = reference.combine(
        ys, reference.factors(received, spec), received, inputs.num_tokens, spec, spec.combine_dtype
    )
    return received, ys, outs


def play(
    buffer: Buffer,
    inputs: Inputs,
    expected: Expected,
    device: torch.device,
    tag: int = 0,
    *,
    max_tokens: int | None = None,
    rows_to_spare: int | None = None,
) -> list[Tensor]:
    """Run this rank's part of a round. Padding and rows past the last expert's are NaN in all tensors passed back.

    Args:
        rows_to_spare: number of rows past the last expert's that combine gets; None for all up to capacity.

    Returns:
        Outputs of the ops, real rows only: recv_x, recv_weights, offs, out, grad_y, grad_x, grad_topk_weights.

    Raises:
        WrongOutput: names the output that differs.
    """
    spec, rank = buffer.spec, buffer.rank
    x = inputs.xs[rank].to(device, copy=True).requires_grad_()
    weights = inputs.topk_weights[rank].to(device, copy=True).requires_grad_()
    idx = inputs.topk_idx[rank].to(device)
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights, tag=tag, max_tokens=max_tokens)

    mine = expected.received[rank]
    n = len(mine.recv_x)
    capacity = buffer.capacity if max_tokens is None else spec.capacity(rank, max_tokens)  # the first grows by "retry"
    check(recv_x.shape == (capacity, spec.hidden), f"recv_x: got {list(recv_x.shape)}")
    check_bits("recv_x", recv_x[:n], mine.recv_x)
    check_placed(capacity, recv_weights, handle, mine)

    num_rows = capacity if rows_to_spare is None else min(n + rows_to_spare, capacity)
    y = padded(without(mine.padding, expected.ys[rank]), num_rows, device).requires_grad_()
    w = None if spec.by_token else padded(mine.recv_weights, capacity, device).requires_grad_()
    out = buffer.combine(y, w, handle)
    check_bits("out", out, expected.outs[rank])

    with torch.no_grad():  # again, into the rows that it reads
        memory = torch.cat([y.flatten(), y.new_empty(out.numel())])
        over = memory[: out.numel()].view_as(out)
        given_back = buffer.combine(memory[: y.numel()].view_as(y), w, handle, out=over)
    check(given_back is over, "out: got another tensor")
    check_bits("out=", over, expected.outs[rank])

    leaves = [y] if w is None else [y, w]
    grad_y, *grad_w = torch.autograd.grad(out, leaves, expected.grad_outs[rank].to(device))
    check_bits("grad_y", grad_y[:n], expected.at_combine[rank][0])
    if grad_w:
        check_close("grad_recv_weights", grad_w[0][:n], expected.at_combine[rank][1], spec.hidden)

    given = [padded(without(mine.padding, t), capacity, device) for t in expected.at_combine[rank]]
    grad_x, grad_topk_weights = torch.autograd.grad([recv_x, recv_weights], [x, weights], given)
    check_bits("grad_x", grad_x, expected.at_dispatch[rank][0])
    check_close("grad_topk_weights", grad_topk_weights, expected.at_dispatch[rank][1], spec.hidden)
    outputs = (recv_x[:n], recv_weights[:n], handle.offs, out, grad_y[:n], grad_x, grad_topk_weights)
    return [t.detach() for t in outputs]


def check_placed(capacity: int, recv_weights: Tensor, handle: Handle, mine: reference.Received) -> None:
    """Check everything that a dispatch returns about the rows of recv_x."""
    n = len(mine.recv_x)
    each = mine.recv_weights.shape[1:]
    check(recv_weights.shape == (capacity, *each), f"recv_weights: got {list(recv_weights.shape)}")
    check_bits("offs", handle.offs, mine.offs)
    check_bits("recv_weights", recv_weights[:n], mine.recv_weights)
    absent = handle.recv_topk_idx is None
    check(absent is (mine.recv_topk_idx is None), f"recv_topk_idx: got {None if absent else 'a tensor'}")
    if handle.recv_topk_idx is not None and mine.recv_topk_idx is not None:
        check(handle.recv_topk_idx.shape == recv_weights.shape, f"recv_topk_idx: got {handle.recv_topk_idx.shape}")
        check_bits("recv_topk_idx", handle.recv_topk_idx[:n], mine.recv_topk_idx)
    if mine.real_ends is not None:
        check_bits("ends", handle.ends, mine.real_ends)
        check_bits("row_experts", handle.row_experts(n), torch.tensor([r.expert for r in mine.kept], dtype=torch.int32))
    dropped, beyond = int(read(handle.num_dropped)), sum(row.source >= 0 for row in mine.rows[n:])
    check(dropped == beyond, f"num_dropped: got {dropped}, expected {beyond}")


def without(padding: Tensor, rows: Tensor) -> Tensor:
    """Return the rows with NaN in the padding."""
    rows = rows.clone()
    rows[padding] = float("nan")
    return rows


def padded(rows: Tensor, capacity: int, device: torch.device) -> Tensor:
    """Return the rows on the device, with NaN up to capacity, which shows in any result that reads them."""
    full = torch.full((capacity, *rows.shape[1:]), float("nan"), dtype=rows.dtype, device=rows.device)
    full[: len(rows)] = rows
    return full.to(device)


def read(t: Tensor) -> Tensor:
    """Return a tensor on the CPU once the current stream has computed it.

    CUDA makes copies to pageable memory wait for each other, those of other streams too. A copy that is queued while an
    op still waits for a peer could hold up that peer's copy, which comes before the peer's own op.
    """
    if t.is_cuda:
        torch.cuda.current_stream(t.device).synchronize()
    return t.detach().cpu()


def check(right: bool, message: str) -> None:
    if not right:
        raise WrongOutput(message)


def check_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Check for equal shape, dtype and bits, on the device of `expected`: NaN equals itself and -0.0 is not 0.0."""
    got, expected = (got.detach() if expected.is_cuda else read(got)).contiguous(), expected.detach().contiguous()
    like, wanted = (f"{t.dtype} {list(t.shape)}" for t in (got, expected))
    check(like == wanted, f"{name}: got shape and dtype {like}, expected {wanted}")
    as_integers = _INTEGERS[got.itemsize]
    wrong = got.view(as_integers) != expected.view(as_integers)
    if bool(read(wrong.any())):
        at = tuple(wrong.nonzero()[0].tolist())
        count = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        raise WrongOutput(f"{name}: {count}, first at {at}: got {got[at].item()}, expected {expected[at].item()}")


def check_close(name: str, got: Tensor, expected: Tensor, num_terms: int) -> None:
    """Check dot products summed in another order; the tolerance grows with the number of terms that may cancel."""
    try:
        torch.testing.assert_close(read(got), expected, rtol=1e-4, atol=1e-4 * max(1.0, num_terms**0.5 / 8))
    except AssertionError as error:
        raise WrongOutput(f"{name}: {error}") from error


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

    received = reference.dispatch_scaled(sent, inputs.topk_idx, inputs.topk_weights, spec, max_tokens)
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
    of_rows = reference.factors(received, spec)
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
