"""Tensors of every kind that torch has, as arguments of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from moe_rt import Buffer

T, H, K, E = 5, 8, 2, 4
SIZES = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=K, num_experts=E, dtype=torch.float32, timeout_s=100.0)


def inputs(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "x": torch.randn(T, H, generator=generator),
        "topk_idx": torch.randint(0, E, (T, K), generator=generator),
        "topk_weights": torch.rand(T, K, generator=generator),
    }


def owes_sign(t: Tensor) -> Tensor:
    """Return a tensor that equals t and has the other sign in memory, as z.conj().imag does."""
    owed = torch._neg_view(-t)
    assert owed.is_neg()
    return owed


def no_memory(t: Tensor) -> Tensor:
    """Return the tensor that forward-mode AD uses for a tangent of zero."""
    return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)


def in_imaginary_part(t: Tensor) -> Tensor:
    """Return a tensor that equals t and is every other element in memory, with the other sign."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def results_of(buffer: Buffer, rank: int, change: Callable[[Tensor], Tensor], real: Callable[[Tensor], Tensor]) -> Any:
    """Return outputs and gradients with every input tensor passed through `real` and then `change`."""
    given = inputs(rank)
    leaves = [change(real(given[name])).requires_grad_() for name in ("x", "topk_weights")]
    recv_x, recv_weights, handle = buffer.dispatch(leaves[0], given["topk_idx"], leaves[1])
    n = int(handle.offs[-1])
    y = torch.zeros_like(recv_x)
    y[:n] = recv_x[:n]
    y_given, weights_given = change(y.detach()).requires_grad_(), change(recv_weights.detach()).requires_grad_()
    out = buffer.combine(y_given, weights_given, handle)
    grad_y, grad_weights = torch.autograd.grad(out, [y_given, weights_given], change(real(torch.ones(T, H))))
    fed = change(real(torch.ones(recv_x.shape))), change(real(torch.ones(recv_weights.shape)))
    back = torch.autograd.grad([recv_x, recv_weights], leaves, fed)
    return [recv_x[:n].detach(), recv_weights[:n].detach(), out.detach(), grad_y[:n], grad_weights[:n], *back]


def kinds_agree(group: Any, kind: str) -> None:
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    same = lambda t: t  # noqa: E731
    change, real = {
        "owes sign": (owes_sign, same),
        "imaginary part": (in_imaginary_part, same),
        "no memory": (no_memory, lambda t: torch.zeros_like(t)),
    }[kind]
    with Buffer(group, **SIZES) as buffer:
        expected = results_of(buffer, rank, same, real)
        torch.testing.assert_close(results_of(buffer, rank, change, real), expected, rtol=0, atol=0)


ODD: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "None": lambda t: None,
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "wrapper": lambda t: TwoTensor(t, t),
}


def odd_argument(group: Any, faulty_rank: int, name: str, argument: str) -> str:
    """The faulty rank passes an unusual argument. Return this rank's error; the group stays usable."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    with Buffer(group, **SIZES) as buffer:
        given: dict[str, Any] = inputs(rank)
        recv_x, recv_weights, handle = buffer.dispatch(**given)
        combined: dict[str, Any] = {"y": recv_x, "recv_weights": recv_weights, "handle": handle}
        call, arguments = (buffer.dispatch, given) if argument in given else (buffer.combine, combined)
        if rank == faulty_rank:
            arguments[argument] = ODD[name](arguments[argument])
        text = "no error"
        try:
            call(**arguments)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        buffer.combine(recv_x, recv_weights, handle)
        return text


def odd_gradient(group: Any, faulty_rank: int) -> str:
    """The faulty rank's rows have a sparse gradient, which torch allows for any tensor."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    with Buffer(group, **SIZES) as buffer:
        given: dict[str, Any] = inputs(rank)
        given["x"].requires_grad_()
        recv_x, recv_weights, handle = buffer.dispatch(**given)
        rows = torch.zeros(2, H, dtype=torch.int64)
        loss = torch.gather(recv_x, 0, rows, sparse_grad=rank == faulty_rank).sum()
        try:
            loss.backward()
            text = "no error"
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        buffer.combine(recv_x, recv_weights, handle)
        return text


def odd_tag(group: Any, faulty_rank: int, tag: Any) -> list[str]:
    """The faulty rank passes an unusual tag to dispatch, and then in a handle. Return this rank's errors."""
    rank, texts = group.rank if isinstance(group.rank, int) else group.rank(), []
    with Buffer(group, **SIZES) as buffer:
        results = buffer.dispatch(**inputs(rank))
        kept = results[2].tag
        results[2].tag = tag if rank == faulty_rank else kept
        for call in (
            lambda: buffer.dispatch(**inputs(rank), tag=tag if rank == faulty_rank else 0),
            lambda: buffer.combine(*results),
        ):
            try:
                call()
                texts.append("no error")
            except RuntimeError as error:
                texts.append(f"{type(error).__name__}: {error}")
        results[2].tag = kept
        buffer.combine(*results)
    return texts


def odd_handle(group: Any, faulty_rank: int, handle: Any, with_out: bool) -> str:
    """The faulty rank passes an unusual handle to combine. Return this rank's error; the group stays usable."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    with Buffer(group, **SIZES) as buffer:
        rows, weights, right = buffer.dispatch(**inputs(rank))
        text = "no error"
        try:
            given = handle if rank == faulty_rank else right
            buffer.combine(rows, weights, given, out=torch.empty(T, H) if with_out else None)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        buffer.combine(rows, weights, right)
        return text


def odd_choice(group: Any, faulty_rank: int, coded: Any) -> str:
    """The faulty rank passes an unusual `coded` to a dispatch with coded rows. Return this rank's error."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    with Buffer(group, **SIZES, dispatch_dtype=torch.int8) as buffer:
        text = "no error"
        try:
            buffer.dispatch(**inputs(rank), coded=coded if rank == faulty_rank else False)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        buffer.dispatch(**inputs(rank))
        return text
