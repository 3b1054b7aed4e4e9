"""Tangents through a buffer's ops, refused derivatives, and whole tensors in anomaly mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_rt import Buffer

T, H, K, E = 5, 8, 2, 4
SIZES = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float64, timeout_s=100.0)


def inputs(rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return T tokens on rank 0 and none elsewhere; the first token names an expert K times, the second none."""
    generator = torch.Generator().manual_seed(rank)
    tokens = T if rank == 0 else 0
    x = torch.randn(tokens, H, generator=generator, dtype=dtype)
    idx = torch.randint(0, E, (tokens, K), generator=generator)
    idx[:1], idx[1:2] = 3, -1
    return x, idx, torch.rand(tokens, K, generator=generator, dtype=dtype)


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else group.rank()


def squares(buffer: Buffer, idx: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a dispatch and combine around experts that square rows, and with layout="tokens" also weight them."""

    def run(x: Tensor, weights: Tensor) -> Tensor:
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        if buffer.spec.by_token:
            return buffer.combine(recv_x.square() * recv_weights.sum(1, keepdim=True), None, handle)
        return buffer.combine(recv_x.square(), recv_weights, handle)

    return run


def tangents_agree(group: Any, options: dict[str, Any], moved: str) -> None:
    """Compare tangents, from torch.func.jvp and from dual numbers, with finite differences."""
    with Buffer(group, **SIZES, **options) as buffer:
        x, idx, weights = inputs(buffer.rank)
        run = squares(buffer, idx)
        directions = [
            torch.randn(t.shape, dtype=t.dtype) * float(name in moved)
            for name, t in zip("xw", (x, weights), strict=True)
        ]
        expected = (
            run(x + 1e-6 * directions[0], weights + 1e-6 * directions[1])
            - run(x - 1e-6 * directions[0], weights - 1e-6 * directions[1])
        ) / 2e-6
        out, tangent = torch.func.jvp(run, (x, weights), tuple(directions))
        torch.testing.assert_close(tangent, expected, rtol=1e-7, atol=1e-8)
        assert torch.equal(out, run(x, weights))
        with torch.no_grad(), forward_ad.dual_level():
            given = [
                forward_ad.make_dual(t, d) if name in moved else t
                for name, t, d in zip("xw", (x, weights), directions, strict=True)
            ]
            dual = forward_ad.unpack_dual(run(*given))
            torch.testing.assert_close(dual.tangent, expected, rtol=1e-7, atol=1e-8)
            assert forward_ad.unpack_dual(dual.primal).tangent is None


def _second(run: Callable[..., Tensor], x: Tensor, weights: Tensor) -> None:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(run(x, weights).sum(), x, create_graph=True)
    grad.square().sum().backward()


def _dual_backward(run: Callable[..., Tensor], x: Tensor, weights: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = run(x, weights)
    with forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


NOT_OFFERED: dict[str, tuple[Callable[..., Any], str]] = {
    "second": (_second, "got a second derivative, expected first ones only"),
    "tangent of a gradient": (_dual_backward, "got a second derivative, expected first ones only"),
    "grad": (lambda run, x, w: torch.func.grad(lambda x: run(x, w).sum())(x), "got a gradient under torch.func"),
    "vjp": (lambda run, x, w: torch.func.vjp(run, x, w), "got a gradient under torch.func"),
    "vmap": (lambda run, x, w: torch.vmap(run, (0, None))(torch.stack([x, x]), w), "got a call under torch.vmap"),
    "jacfwd": (
        lambda run, x, w: torch.func.jacfwd(run)(torch.ones(T, H).double()[: len(x)], w),
        "got a call under torch.vmap",
    ),
    "batched": (
        lambda run, x, w: torch.autograd.grad(run(x, w), w, torch.ones(2, len(x), H).double(), is_grads_batched=True),
        "grad_out: got a batch of them, as torch.vmap makes",
    ),
}


def not_offered(group: Any, what: str) -> str:
    """Return this rank's error; the group stays usable."""
    with Buffer(group, **SIZES) as buffer:
        x, idx, weights = inputs(0)
        run = squares(buffer, idx)
        text = "no error"
        try:
            NOT_OFFERED[what][0](run, x, weights.requires_grad_(what == "batched"))
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        with torch.no_grad():
            run(x, weights)
        return text


def no_tangent(group: Any, what: str) -> str:
    """Return the error of an op without tangents; the group stays usable."""
    coded = {"payload": "dispatch_dtype", "coded": "dispatch_dtype", "returned payload": "combine_dtype"}.get(what)
    codes = {coded: torch.int8, "dtype": torch.float32} if coded else {}
    with Buffer(group, **{**SIZES, **codes}) as buffer:
        x, idx, weights = inputs(0, buffer.spec.dtype)
        results = buffer.dispatch(x, idx, weights)
        text = "no error"
        with torch.no_grad(), forward_ad.dual_level():
            try:
                if what == "out":
                    y = forward_ad.make_dual(results[0], torch.ones_like(results[0]))
                    buffer.combine(y, *results[1:], out=torch.empty_like(x))
                elif what == "window":
                    window = buffer.token_window(len(x)).copy_(x)
                    buffer.dispatch(forward_ad.make_dual(window, torch.ones_like(x)), idx, weights)
                else:
                    buffer.dispatch(forward_ad.make_dual(x, torch.ones_like(x)), idx, weights, coded=what == "coded")
            except RuntimeError as error:
                text = f"{type(error).__name__}: {error}"
        buffer.combine(*results)
        return text


@contextmanager
def poisoned() -> Iterator[None]:
    """torch fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tails(group: Any, options: dict[str, Any]) -> None:
    """Rows past the end are zero in anomaly mode, in every output, small or large; otherwise they stay unwritten."""
    for hidden in (H, 1 << 16):
        sizes = {**SIZES, "hidden": hidden, "dtype": torch.float32, **options}
        with Buffer(group, **sizes) as buffer, poisoned():
            _, idx, weights = inputs(buffer.rank, torch.float32)
            x = torch.ones(len(idx), hidden)

            def step(x: Tensor = x, idx: Tensor = idx, weights: Tensor = weights) -> list[Tensor]:
                rows, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
                recv_x, recv_weights, handle = buffer.dispatch(rows, idx, w)
                y = recv_x.detach().requires_grad_()
                given = None if buffer.spec.by_token else recv_weights.detach().requires_grad_()
                out = buffer.combine(y, given, handle)
                leaves = [y] if given is None else [y, given]
                grads = torch.autograd.grad(out.sum(), leaves)
                torch.autograd.grad([recv_x, recv_weights], [rows, w], [grads[0], torch.ones_like(recv_weights)])
                end = int(handle.offs[-1])
                outputs = [recv_x, recv_weights, *grads]
                if buffer.spec.dispatch_dtype is not None:
                    with torch.no_grad():
                        outputs += buffer.dispatch(x, idx, weights, coded=True)[0]
                return [t.detach()[end:].float() for t in outputs]

            assert all(t.numel() and t.ne(0).any() for t in step())
            with torch.autograd.detect_anomaly(check_nan=False):
                assert all(not t.any() for t in step())
