"""Activations: gradients and tangents are autograd's of the formula, also at the edges of their pieces and of rows."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_rt.errors import InvalidInput
from moe_rt.ops import activations
from moe_rt.ops.activations import Activation, activate, apply, swiglu

KINDS = get_args(Activation)
LIMIT = 2.0
EDGES = [-LIMIT - 0.5, -LIMIT, -LIMIT + 0.5, -0.0, 0.0, 0.5, LIMIT - 0.5, LIMIT, LIMIT + 0.5]


def grid(kind: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return all pairs of edges as gate and up, or the edges for a kind without a gate."""
    if kind == "relu2":
        return [torch.tensor([EDGES], dtype=dtype)]
    gate, up = zip(*itertools.product(EDGES, EDGES), strict=True)
    return [torch.tensor([gate], dtype=dtype), torch.tensor([up], dtype=dtype)]


def packed(h: list[Tensor], interleaved: bool) -> list[Tensor]:
    return [torch.stack(h, -1).flatten(1) if interleaved else torch.cat(h, 1)] if len(h) == 2 else h


def offs_of(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("how", ["two", "packed", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_the_edges(kind: Activation, how: str) -> None:
    """The gradient where a clamp or a relu begins is that of torch's clamp and relu."""
    h = [t.requires_grad_() for t in grid(kind)]
    given = h if how == "two" else packed(h, how == "interleaved")
    options = dict(alpha=1.3, limit=LIMIT)
    y = activate(given, offs_of(0, 1), kind, interleaved=how == "interleaved", **options)
    expected = apply(kind, h[0], h[1] if len(h) == 2 else None, **options)
    torch.testing.assert_close(y, expected)
    grad = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    torch.testing.assert_close(torch.autograd.grad(y, h, grad), torch.autograd.grad(expected, h, grad))


def test_formulas_by_hand() -> None:
    one, two = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    sigmoid = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    normal = 0.5 * (1 + torch.erf(torch.tensor(0.5**0.5)))
    for kind, expected in {"swiglu": 2 * sigmoid, "geglu": 2 * normal, "relu2": 4.0, "clamped_swiglu": 0.0}.items():
        if kind == "clamped_swiglu":
            expected = (2 + 1) / (1 + torch.exp(torch.tensor(-1.702)))
        gate, up = (two, None) if kind == "relu2" else (one, two)
        torch.testing.assert_close(apply(kind, gate, up), torch.as_tensor(expected).reshape(1, 1))  # type: ignore[arg-type]
    torch.testing.assert_close(apply("geglu_tanh", one, two), 2 * torch.nn.functional.gelu(one, approximate="tanh"))


def test_limits_unless_given() -> None:
    """They are those of GPT-OSS: 7 for gate and up, and 1.702."""
    gate, up = torch.tensor([[6.9, 7.1, 1.0]]), torch.tensor([[-7.1, 6.9, 7.5]])
    gates, ups = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (ups + 1) * gates * torch.sigmoid(1.702 * gates)
    torch.testing.assert_close(apply("clamped_swiglu", gate, up), expected)
    torch.testing.assert_close(activate([gate, up], offs_of(1), "clamped_swiglu"), expected)
    whole = activate([torch.cat([gate, up], 1)], offs_of(1), "clamped_swiglu")
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("real", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_number(kind: Activation, dtype: torch.dtype, real: int) -> None:
    """No row, one row and all rows; the rest is NaN and stays away from real rows."""
    generator = torch.Generator().manual_seed(0)
    h = [torch.randn(5, 4, generator=generator).to(dtype) for _ in range(1 if kind == "relu2" else 2)]
    grad = torch.randn(5, 4, generator=generator).to(dtype)
    for t in (*h, grad):
        t[real:] = torch.nan
    leaves = [t.clone().requires_grad_() for t in h]
    wide = [t[:real].to(torch.promote_types(dtype, torch.float32)).detach().requires_grad_() for t in h]
    expected = apply(kind, wide[0], wide[1] if len(wide) == 2 else None)
    want = torch.autograd.grad(expected, wide, grad[:real].to(expected.dtype))
    for offs in (offs_of(real), offs_of(0, real), offs_of(real, real)):
        y = activate(leaves, offs, kind)
        assert (y.shape, y.dtype) == ((5, 4), dtype)
        torch.testing.assert_close(y[:real], expected.to(dtype))
        for got, exact in zip(torch.autograd.grad(y, leaves, grad), want, strict=True):
            assert (got.shape, got.dtype) == ((5, 4), dtype)
            torch.testing.assert_close(got[:real], exact.to(dtype))
    if kind != "relu2":
        whole = torch.cat(leaves, 1).detach().requires_grad_()
        y = activate([whole], offs_of(real), kind)
        (got,) = torch.autograd.grad(y, whole, grad)
        close = dict(rtol=2e-2, atol=2e-2) if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(got[:real], torch.cat([t.to(dtype) for t in want], 1), **close)


def test_swiglu_of_packed_columns_has_its_own_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a kernel on GPUs; other kinds and layouts are torch's operations."""
    calls: list[str] = []
    monkeypatch.setattr(activations, "swiglu", lambda gate_up, offs: calls.append("swiglu") or swiglu(gate_up, offs))
    h, two = torch.randn(3, 8), list(torch.randn(2, 3, 4))
    for kind, given, interleaved, expected in (
        ("swiglu", [h], False, ["swiglu"]),
        ("swiglu", [h], True, []),
        ("swiglu", two, False, []),
        ("geglu", [h], False, []),
        ("relu2", [h], False, []),
    ):
        calls.clear()
        activate(given, offs_of(3), kind, interleaved=interleaved)  # type: ignore[arg-type]
        assert calls == expected, (kind, len(given), interleaved)


@pytest.mark.parametrize("how", ["swiglu", "activate"])
def test_a_gradient_has_no_tangent(how: str) -> None:
    """Forward mode over a backward is a second derivative."""
    h = torch.randn(3, 8, dtype=torch.float64).requires_grad_()
    y = swiglu(h, offs_of(3)) if how == "swiglu" else activate([h], offs_of(3), "geglu")
    grad: Any = torch.ones_like(y)
    with forward_ad.dual_level(), pytest.raises(InvalidInput) as raised:
        torch.autograd.grad(y, h, forward_ad.make_dual(grad, grad))
    assert str(raised.value).startswith("activation: got a second derivative, expected first ones only")
