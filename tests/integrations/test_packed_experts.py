"""Experts of Transformers on packed rows against a loop over rows: layouts, gates, unused rows, and own forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.needs_transformers import require_transformers

require_transformers()

from torch import Tensor, nn  # noqa: E402
from transformers.activations import SiLUActivation  # noqa: E402
from transformers.integrations.moe import _default_apply_gate  # noqa: E402

from moe_rt.integrations.packed_experts import PackedExperts  # noqa: E402

HIDDEN, INNER, LOCAL = 8, 16, 3


def clamped(self: Any, gate_up: Tensor) -> Tensor:
    """A model's own gate: interleaved and clamped."""
    return gate_up[:, ::2].clamp(max=0.5) * torch.tanh(gate_up[:, 1::2])


class Experts(nn.Module):
    """The parameters and flags of an experts module, and its formula for one expert's rows."""

    def __init__(
        self, gate: bool, bias: bool, transposed: bool, implementation: str | None = "grouped_mm", act: Any = None
    ) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed, self.has_post_expert_norm = gate, bias, transposed, False
        self.config = SimpleNamespace(_experts_implementation=implementation)
        self.act_fn = nn.SiLU() if act is None else act
        draw, up = torch.Generator().manual_seed(0), "gate_up_proj" if gate else "up_proj"
        wide = 2 * INNER if gate else INNER
        for name, rows, columns in ((up, wide, HIDDEN), ("down_proj", HIDDEN, INNER)):
            shape = (LOCAL, columns, rows) if transposed else (LOCAL, rows, columns)
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=draw) / 3))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(LOCAL, rows, generator=draw)))

    _apply_gate = _default_apply_gate

    def linear(self, x: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, name)[expert]
        y = x @ (weight if self.is_transposed else weight.T)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def one(self, x: Tensor, expert: int) -> Tensor:
        up = self.linear(x, "gate_up_proj" if self.has_gate else "up_proj", expert)
        return self.linear(self._apply_gate(up) if self.has_gate else self.act_fn(up), "down_proj", expert)


class OwnGate(Experts):
    _apply_gate = clamped


def never(*given: Any) -> Tensor:
    raise AssertionError("its own forward ran")


CASES = {
    "gate": (Experts, True, False, False, None),
    "gate of transformers": (Experts, True, False, False, SiLUActivation()),
    "gate, biases": (Experts, True, True, False, None),
    "gate, transposed": (Experts, True, True, True, None),
    "another activation": (Experts, True, False, False, nn.GELU()),
    "its own gate": (OwnGate, True, True, True, None),
    "no gate": (Experts, False, False, False, nn.ReLU()),
    "no gate, biases": (Experts, False, True, True, nn.Tanh()),
}
COUNTS = [[2, 0, 3], [0, 0, 1], [0, 0, 0], [4, 1, 3]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_grouped_products_equal_a_loop(case: str, counts: list[int]) -> None:
    """Rows past the last expert's hold NaN, and so do their gradients; nothing of them reaches the others."""
    kind, gate, bias, transposed, act = CASES[case]
    module, real = kind(gate, bias, transposed, act=act), sum(counts)
    packed = PackedExperts(module, never, LOCAL)
    assert packed.grouped
    x = torch.randn(8, HIDDEN)
    rows = x.clone()
    rows[real:] = torch.nan
    rows.requires_grad_()
    own = x[:real].clone().requires_grad_()
    out = packed(rows, torch.tensor(counts).cumsum(0).int())
    right = torch.cat([module.one(part, e) for e, part in enumerate(own.split(counts))])
    assert out.shape == (8, HIDDEN)
    assert torch.allclose(out[:real], right, atol=1e-5)
    grad = torch.full_like(out, torch.nan)
    grad[:real] = torch.randn(real, HIDDEN)
    out.backward(grad)
    got = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    right.backward(grad[:real])
    assert rows.grad is not None
    assert own.grad is not None
    assert torch.allclose(rows.grad[:real], own.grad, atol=1e-5)
    for name, p in module.named_parameters():
        assert torch.allclose(got[name], p.grad if p.grad is not None else torch.zeros_like(p), atol=1e-5), name


@pytest.mark.parametrize("implementation", ["eager", "another", None])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_modules_own_forward_gets_real_rows(counts: list[int], implementation: str | None) -> None:
    """It gets at least one row; one that is unused has zeros, no weight and, for an eager loop, a local expert."""
    module, real, seen = Experts(True, False, False, implementation), sum(counts), list[Any]()

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append((x.detach(), ids, weights))
        known = ids.flatten().clamp(max=LOCAL - 1)
        return torch.stack([module.one(row, e) for row, e in zip(x, known.tolist(), strict=True)]) * weights

    packed = PackedExperts(module, forward, LOCAL)
    assert not packed.grouped
    rows = torch.randn(8, HIDDEN)
    rows[real:] = torch.nan
    rows.requires_grad_()
    out = packed(rows, torch.tensor(counts).cumsum(0).int())
    ((x, ids, weights),) = seen
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    unused = LOCAL - 1 if implementation in ("eager", None) else LOCAL
    assert ids.tolist() == [[e] for e in experts or [unused]]
    assert weights.dtype is rows.dtype
    assert weights.tolist() == [[1.0] for _ in experts] or (not real and weights.tolist() == [[0.0]])
    assert torch.equal(x, rows.detach()[:real] if real else torch.zeros(1, HIDDEN))
    assert out.shape == rows.shape
    assert not out[real:].any()
    out.sum().backward()
    assert module.down_proj.grad is not None
    assert module.down_proj.grad.isfinite().all()
    assert rows.grad is not None
    assert not rows.grad[real:].any()


def test_rows_of_one_dtype_and_products_of_another() -> None:
    module = Experts(True, False, False).bfloat16()
    packed = PackedExperts(module, never, LOCAL)
    assert packed.dtype_of_rows(torch.zeros(1)) is torch.bfloat16
    module.config._experts_implementation = "eager"  # as a user may change it between calls
    assert packed.dtype_of_rows(torch.zeros(1)) is torch.float32
    own = PackedExperts(module, lambda x, ids, weights: x.double(), LOCAL)
    assert own(torch.ones(2, HIDDEN), torch.tensor([1, 1, 2])).dtype is torch.float32


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_modules_whose_formula_is_known(implementation: str) -> None:
    def grouped(module: Any) -> bool:
        return PackedExperts(module, never, LOCAL).grouped

    assert grouped(Experts(True, True, False, implementation))
    for flag in ("config", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed"):
        module = Experts(True, True, False, implementation)
        delattr(module, flag)
        assert not grouped(module), flag
    norm, parameter, nested = (Experts(True, True, False, implementation) for _ in range(3))
    norm.has_post_expert_norm = True
    parameter.scale = nn.Parameter(torch.ones(1))
    nested.act_fn = nn.PReLU()
    assert not any(map(grouped, (norm, parameter, nested)))


@pytest.mark.parametrize("row_wise", [False, True])
def test_equal_bits_are_asked_of_both_products(monkeypatch: pytest.MonkeyPatch, row_wise: bool) -> None:
    from moe_rt.integrations import packed_experts

    asked, linear = list[Any](), packed_experts.grouped_linear

    def recorded(*given: Any, **options: Any) -> Tensor:
        asked.append(options)
        return linear(*given, **options)

    monkeypatch.setattr(packed_experts, "grouped_linear", recorded)
    packed = PackedExperts(Experts(True, True, True), never, LOCAL)
    assert packed.row_wise is False
    packed.row_wise = row_wise
    packed(torch.randn(4, HIDDEN), torch.tensor([1, 2, 4]).int())
    assert asked == [{"transposed": True, "row_wise": row_wise}] * 2
