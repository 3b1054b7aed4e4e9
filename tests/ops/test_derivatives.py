"""Forward mode, transforms of functions, second derivatives and anomaly mode are right, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS, HEAPS
from ops import cases_derivatives as cases
from support.ranks import Ranks
from torch import Tensor

from moe_rt import Buffer
from moe_rt.errors import InvalidInput
from moe_rt.ops.activations import activate, swiglu
from moe_rt.ops.grouped import grouped_linear

MakeRanks = Callable[[str, int], Ranks]
SIZE = 2
OPTIONS: dict[str, dict[str, Any]] = {"experts": {}, "tokens": {"layout": "tokens"}, "aligned": {"expert_alignment": 8}}


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize(("options", "moved"), [(o, "xw") for o in OPTIONS] + [("experts", "x"), ("experts", "w")])
def test_tangents_are_finite_differences(make_ranks: MakeRanks, heap: str, options: str, moved: str) -> None:
    """Tangents equal finite differences. Forward mode is global to a process, so each process has one rank."""
    make_ranks(heap, SIZE if heap == "shm" else 1).run(cases.tangents_agree, OPTIONS[options], moved)


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("what", cases.NOT_OFFERED)
def test_what_is_not_offered_is_refused(make_ranks: MakeRanks, heap: str, what: str) -> None:
    for text in make_ranks(heap, SIZE if heap == "shm" else 1).run(cases.not_offered, what):
        assert text.startswith("InvalidInput: ")
        assert cases.NOT_OFFERED[what][1] in text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("out", "out: got a combine that gradients are recorded of"),
        ("window", "x: got a token window in a dispatch that gradients are recorded of"),
        ("coded", "x: got codes, or coded=True, in a dispatch that gradients are recorded of"),
        ("payload", "dispatch: got tangents in a buffer with a dispatch_dtype or combine_dtype, expected none"),
        (
            "returned payload",
            "dispatch: got tangents in a buffer with a dispatch_dtype or combine_dtype, expected none",
        ),
    ],
)
def test_what_has_no_tangents_is_refused(make_ranks: MakeRanks, what: str, message: str) -> None:
    for text in make_ranks("shm", SIZE).run(cases.no_tangent, what):
        assert text.startswith(f"InvalidInput: {message}")


OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)
ROWS, OUT = 8, 6


def _kernels() -> dict[str, Callable[..., Tensor]]:
    kinds: dict[str, Callable[..., Tensor]] = {
        "linear": lambda x, w, b: grouped_linear(x, w, OFFS),
        "bias": lambda x, w, b: grouped_linear(x, w, OFFS, b),
        "transposed": lambda x, w, b: grouped_linear(x, w.transpose(1, 2), OFFS, b, transposed=True),
        "swiglu": lambda x, w, b: swiglu(grouped_linear(x, w, OFFS, b), OFFS),
        "interleaved": lambda x, w, b: activate([grouped_linear(x, w, OFFS, b)], OFFS, "geglu", interleaved=True),
        "split": lambda x, w, b: activate([grouped_linear(x, w, OFFS, b), x[:, :OUT]], OFFS, "clamped_swiglu"),
        "one of two": lambda x, w, b: activate(
            [grouped_linear(x, w, OFFS), torch.ones(ROWS, OUT).double()], OFFS, "geglu_tanh"
        ),
        "relu2": lambda x, w, b: activate([grouped_linear(x, w, OFFS, b)], OFFS, "relu2"),
    }
    return kinds


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64) for shape in ((ROWS, OUT), (3, OUT, OUT), (3, OUT))]


@pytest.mark.parametrize("kind", _kernels())
def test_tangents_of_experts_are_finite_differences(kind: str) -> None:
    """Tangents of each operand and of all together equal finite differences; rows past the end are not compared."""
    run, given = _kernels()[kind], operands()
    moves = [[torch.randn_like(t) * float(i in (j, 3)) for i, t in enumerate(given)] for j in range(3)]
    for directions in (*moves, [torch.randn_like(t) for t in given]):
        both = [run(*(t + sign * 1e-6 * d for t, d in zip(given, directions, strict=True))) for sign in (1, -1)]
        used = [i for i, d in enumerate(directions) if d.any()]

        def of_used(*some: Tensor, used: list[int] = used) -> Tensor:
            return run(*(some[used.index(i)] if i in used else t for i, t in enumerate(given)))

        _, tangent = torch.func.jvp(of_used, tuple(given[i] for i in used), tuple(directions[i] for i in used))
        torch.testing.assert_close(tangent[:5], ((both[0] - both[1]) / 2e-6)[:5], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["swiglu", "interleaved", "relu2", "linear", "bias"])
def test_second_derivatives_of_experts_are_refused(kind: str) -> None:
    given = [t.requires_grad_() for t in operands()]
    grads = torch.autograd.grad(_kernels()[kind](*given)[:5].square().sum(), given[:2], create_graph=True)
    with pytest.raises(InvalidInput, match="got a second derivative, expected first ones only"):
        sum(g[:2].square().sum() for g in grads).backward()


@pytest.mark.parametrize(
    "transform", [torch.func.grad, lambda f: torch.vmap(f, randomness="same")], ids=["grad", "vmap"]
)
def test_transforms_of_experts_are_refused(transform: Callable[..., Any]) -> None:
    x, w, b = operands()
    for kind, run in _kernels().items():
        given = x if transform is torch.func.grad else torch.stack([x, x])
        with pytest.raises(InvalidInput, match=r"under torch\.(func|vmap)"):
            transform(lambda x, run=run: run(x, w, b).sum())(given), pytest.fail(kind)


def test_a_compiled_function_has_tangents() -> None:
    with Buffer(None, **cases.SIZES) as buffer:
        x, idx, weights = cases.inputs(0)
        run = cases.squares(buffer, idx)
        direction = torch.randn_like(x)

        def tangent(x: Tensor) -> Tensor:
            return torch.func.jvp(lambda x: run(x, weights), (x,), (direction,))[1]

        compiled = torch.compile(tangent, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), tangent(x))


ANOMALY = {**OPTIONS, "codes": {"dispatch_dtype": torch.int8}}


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("options", ANOMALY)
def test_tails_are_zero_in_anomaly_mode(make_ranks: MakeRanks, heap: str, options: str) -> None:
    """Rows past the end are zero in anomaly mode, which is global to a process, so each process has one rank."""
    make_ranks(heap, SIZE if heap == "shm" else 1).run(cases.tails, ANOMALY[options])
