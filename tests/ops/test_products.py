"""Grouped products and sums: equal to plain loops, by the fewest and cheapest operations, also as a GPU runs them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt.errors import InvalidInput
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.ops import grouped
from moe_rt.ops.grouped import TILE, add_gradient_of_weight, grouped_linear, row_wise_linear, row_wise_sigmoid
from moe_rt.ops.tree_sums import for_each_sequence, tree_sum

IN, OUT = 8, 16
SPREADS = ([4, 0, 5], [0, 0, 0], [0, 9, 0], [1, 0, 0], [9], [17, 16, 15])


def offs_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loop(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([rows @ w.T for rows, w in zip(x[: sum(sizes)].split(sizes), weight, strict=True)])


class Seen(TorchDispatchMode):
    """Records the names and the shapes of the first operands of operations that cost something."""

    COST = ("mm", "bmm", "addmm", "addmm_", "_grouped_mm", "constant_pad_nd", "copy_", "stack", "cat", "clone")

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.COST:
            self.ops.append((name, [list(t.shape) for t in args if isinstance(t, Tensor)]))
        return func(*args, **(kwargs or {}))


def seen_in_product(
    a: Tensor, b: Tensor, sizes: list[int], row_wise: bool = False
) -> list[tuple[str, list[list[int]]]]:
    with Seen() as seen:
        grouped._grouped_mm(a, b, offs_of(sizes), row_wise)
    return seen.ops


def test_products_of_rows_by_themselves_are_filled_up_to_tiles() -> None:
    """MKL sums the rest of rows and columns in another order, so no product has such a rest."""
    a = drawn(37, IN)
    narrow, wide = drawn(2, IN, 5), drawn(2, IN, OUT)
    assert TILE == 16
    assert seen_in_product(a, wide, [35, 0], True) == [
        ("mm", [[32, IN], [IN, OUT]]),
        ("constant_pad_nd", [[3, IN]]),
        ("mm", [[16, IN], [IN, OUT]]),
        ("copy_", [[3, OUT], [3, OUT]]),
    ]
    assert seen_in_product(a, wide, [0, 32], True) == [("mm", [[32, IN], [IN, OUT]])]
    assert seen_in_product(a, narrow, [0, 16], True) == [
        ("constant_pad_nd", [[IN, 5]]),
        ("mm", [[16, IN], [IN, 16]]),
        ("copy_", [[16, 5], [16, 5]]),
    ]
    assert seen_in_product(a, narrow, [1, 0], True) == [
        ("constant_pad_nd", [[IN, 5]]),
        ("constant_pad_nd", [[1, IN]]),
        ("mm", [[16, IN], [IN, 16]]),
        ("copy_", [[1, 5], [1, 5]]),
    ]


def test_an_expert_without_rows_costs_nothing() -> None:
    odd = drawn(3, IN, 5, dtype=torch.float64)
    for row_wise in (False, True):
        assert seen_in_product(drawn(9, IN, dtype=torch.float64), odd, [0, 0, 0], row_wise) == []
    assert seen_in_product(drawn(9, IN, dtype=torch.float64), odd, [2, 0, 3]) == [
        ("mm", [[2, IN], [IN, 5]]),
        ("mm", [[3, IN], [IN, 5]]),
    ]
    total = torch.zeros(3, IN, 5)
    with Seen() as seen:
        add_gradient_of_weight(total, drawn(9, IN), drawn(9, 5), offs_of([0, 4, 0]), True)
    assert [name for name, _ in seen.ops] == ["addmm_"]


def test_copies_of_one_weight_are_one_product() -> None:
    """Sequences share a weight, which one product of all their rows reads once."""
    copies = for_each_sequence(drawn(OUT, IN), 3).mT
    assert seen_in_product(drawn(48, IN), copies, [16, 16, 16], True) == [("mm", [[48, IN], [IN, OUT]])]


LAYOUTS: dict[str, Any] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "odd rows": lambda t: F.pad(t, (0, 1))[..., :-1],
    "every other element": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "one column": lambda t: t[..., :1].contiguous(),
    "experts last": lambda t: F.pad(t.permute(1, 2, 0), (0, 1))[..., :3].permute(2, 0, 1) if t.dim() == 3 else t,
    "fp64": lambda t: t.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["rows", "gradient of weights"])
def test_the_kernel_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch, layout: str, way: str) -> None:
    """torch's kernel takes rows or columns of a multiple of 16 bytes, but no fp64; the loop multiplies the rest."""
    kernel = F.grouped_mm
    change = LAYOUTS[layout]
    for changed in ("a", "b"):
        shapes = ((9, IN), (3, IN, OUT)) if way == "rows" else ((9, IN), (9, OUT))
        a, b = (drawn(*shape) for shape in shapes)
        if layout == "one column":
            a, b = (a, change(b)) if way == "rows" else (change(a), b)
        elif layout == "fp64":
            a, b = change(a), change(b)
        else:
            a, b = (change(a), b) if changed == "a" else (a, change(b))
        a = a if way == "rows" else a.t()
        offs, calls = offs_of([4, 0, 5]), []
        unchanged = layout == "plain" or (layout == "experts last" and (changed == "a" or way != "rows"))
        takes = unchanged or (layout == "transposed" and (way, changed) == ("rows", "b"))
        with monkeypatch.context() as patched:
            patched.setattr(F, "grouped_mm", lambda *args, **named: calls.append(args) or kernel(*args, **named))  # noqa: B023
            y = grouped._grouped_mm(a, b, offs)
        assert bool(calls) == takes, changed
        if way == "rows":
            torch.testing.assert_close([y[:4], y[4:9]], [a[:4] @ b[0], a[4:9] @ b[2]])
        else:
            parts = [a[:, i:j] @ b[i:j] for i, j in ((0, 4), (4, 4), (4, 9))]
            torch.testing.assert_close(y, torch.stack(parts))


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that sets the compute capability of the GPU that tensors are on, which is the CPU here."""
    found: dict[Any, tuple[int, int]] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.__getitem__)
    grouped._compute_capability.cache_clear()

    def set_to(major: int) -> None:
        grouped._compute_capability.cache_clear()
        found[torch.device("cpu")] = (major, 0)

    yield set_to
    grouped._compute_capability.cache_clear()


GPU_LAYOUTS = LAYOUTS | {"expanded": lambda t: t[..., :1, :].expand(t.shape), "narrow": lambda t: t[..., :5]}


@pytest.mark.parametrize("major", [8, 9, 10, 11])
@pytest.mark.parametrize("way", ["rows", "gradient of weights"])
def test_a_gpu_gets_what_does_not_wait_for_its_host(
    monkeypatch: pytest.MonkeyPatch, capability: Any, major: int, way: str
) -> None:
    """Elsewhere torch's product would read offs on the host, pad, or refuse; tiles then multiply."""
    calls: list[int] = []

    def kernel(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(1)
        return grouped._tiled_mm(a, b, offs)

    def uses_kernel(a: Tensor, b: Tensor) -> bool:
        """Multiply, compare with a loop, and return whether the kernel did it."""
        calls.clear()
        y = grouped._grouped_mm_on_gpu(a, b, offs_of([4, 0, 12]))
        parts = (
            [a[:4] @ b[0], a[4:] @ b[2]]
            if way == "rows"
            else [a[:, i:j] @ b[i:j] for i, j in ((0, 4), (4, 4), (4, 16))]
        )
        torch.testing.assert_close([y[:4], y[4:]] if way == "rows" else list(y), parts, rtol=2e-2, atol=2e-2)
        return bool(calls)

    monkeypatch.setattr(F, "grouped_mm", kernel)
    capability(major)
    capable = major in (9, 10)
    shape = (3, IN, OUT) if way == "rows" else (16, OUT)
    transposed = (lambda t: t) if way == "rows" else Tensor.t
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = drawn(16, IN, dtype=dtype), drawn(*shape, dtype=dtype)
        assert uses_kernel(transposed(a), b) == (capable and dtype is torch.bfloat16)
    a, b = drawn(16, IN, dtype=torch.bfloat16), drawn(*shape, dtype=torch.bfloat16)
    for layout, change in GPU_LAYOUTS.items():
        if layout in ("plain", "transposed") or (layout == "experts last" and way != "rows"):
            fits = {"a", "b"}
        else:
            fits = {"a"} if layout in ("narrow", "experts last") else set()
        if layout == "fp64":
            assert not uses_kernel(transposed(change(a)), change(b))
            continue
        assert uses_kernel(transposed(a), change(b)) == (capable and "b" in fits), layout
        if way != "rows" or change(a).shape == a.shape:
            assert uses_kernel(transposed(change(a)), b) == (capable and "a" in fits), layout
    calls.clear()
    empty = (a[:0], b) if way == "rows" else (a[:0].t(), b[:0])
    assert not grouped._grouped_mm_on_gpu(*empty, offs_of([0, 0, 0])).any()
    assert not calls


@pytest.mark.parametrize("sizes", [[5, 5, 5, 1], [16, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 13]], ids=str)
def test_tiles_are_twice_the_rows(sizes: list[int]) -> None:
    """Every distribution of rows costs the same, on a GPU that does not know it."""
    x, weight, grad = drawn(16, IN), drawn(4, OUT, IN), drawn(16, OUT)
    with Seen() as seen:
        y, product = grouped._tiled_mm(x, weight.mT, offs_of(sizes)), grouped._tiled_mm(grad.t(), x, offs_of(sizes))
    assert [op for op in seen.ops if op[0] == "bmm"] == [
        ("bmm", [[8, 4, IN], [8, IN, OUT]]),
        ("bmm", [[8, OUT, 4], [8, 4, IN]]),
    ]
    torch.testing.assert_close(y[: sum(sizes)], loop(x, weight, sizes))
    parts = zip(grad[: sum(sizes)].split(sizes), x[: sum(sizes)].split(sizes), strict=True)
    torch.testing.assert_close(product, torch.stack([g.T @ rows for g, rows in parts]))


@pytest.mark.parametrize(("has_bf16", "has_fp16"), [(False, True), (True, False)])
def test_what_a_cpu_multiplies(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, has_fp16: bool) -> None:
    """Each 16-bit type has its own instructions, which oneDNN knows; torch multiplies others anyhow."""
    multiplies = grouped._cpu_multiplies.__wrapped__
    found = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: has_bf16, _is_mkldnn_fp16_supported=lambda: has_fp16)
    monkeypatch.setattr(torch.ops, "mkldnn", found)
    for available in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda available=available: available)
        assert multiplies(torch.bfloat16) is (available and has_bf16)
        assert multiplies(torch.float16) is (available and has_fp16)
        assert multiplies(torch.float32) is multiplies(torch.float64) is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_gradients_of_a_weight_add_up_in_place(sizes: list[int], contiguous: bool, dtype: torch.dtype) -> None:
    """The first one is new and in the weight's layout; others are added to it, over real rows only."""
    real = sum(sizes)
    a, grad = drawn(real + 2, IN, dtype=dtype), drawn(real + 2, OUT, dtype=dtype, seed=1)
    a[real:], grad[real:] = torch.nan, torch.nan
    parts = zip(a[:real].double().split(sizes), grad[:real].double().split(sizes), strict=True)
    exact = torch.stack([rows.T @ g for rows, g in parts])
    total = add_gradient_of_weight(None, a, grad, offs_of(sizes), contiguous)
    assert (total if contiguous else total.mT).is_contiguous()
    close = dict(rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-4)
    torch.testing.assert_close(total.double(), exact, **close)
    again = add_gradient_of_weight(total, a, 2 * grad, offs_of(sizes), contiguous)
    assert again is total
    torch.testing.assert_close(total.double(), 3 * exact, rtol=close["rtol"], atol=4 * close["atol"])


def test_a_sum_of_gradients_without_instructions_rounds_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is computed in fp32, and rounded, before it is added."""
    monkeypatch.setattr(grouped, "_cpu_multiplies", lambda dtype: False)
    a, grad, sizes = drawn(9, IN, dtype=torch.bfloat16), drawn(9, OUT, dtype=torch.bfloat16, seed=1), [4, 0, 5]
    first = add_gradient_of_weight(None, a, grad, offs_of(sizes), True)
    parts = zip(a.float().split(sizes), grad.float().split(sizes), strict=True)
    check_bits("first", first, torch.stack([rows.T @ g for rows, g in parts]).bfloat16())
    total = torch.full_like(first, 1.5)
    add_gradient_of_weight(total, a, grad, offs_of(sizes), True)
    check_bits("total", total, first + 1.5)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_gpu_s_sum_of_gradients_does_not_wait() -> None:
    """Fake tensors have no values, so a read of offs would raise; so would an operand on the CPU."""
    with FakeTensorMode():
        a, grad, total = (torch.empty(*shape, device="cuda") for shape in ((9, IN), (9, OUT), (3, IN, OUT)))
        offs = torch.empty(3, dtype=torch.int32, device="cuda")
        assert add_gradient_of_weight(total, a, grad, offs, True) is total


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_gpu_s_rows_stay_on_their_device() -> None:
    """Tensors on the meta device have no values either, and mix with none on the CPU."""
    with torch.device("meta"), torch.autograd.detect_anomaly(check_nan=False):
        rows, bias, offs = torch.empty(9, OUT), torch.empty(3, OUT), torch.empty(3, dtype=torch.int32)
    y = grouped._grouped_add_on_gpu(rows, bias, offs)
    assert (y.shape, y.device.type) == ((9, OUT), "meta")
    with torch.autograd.detect_anomaly(check_nan=False):
        y = grouped._grouped_add_on_gpu(rows, bias, offs)
    assert (y.shape, y.device.type) == ((9, OUT), "meta")
    h, product = (
        grouped._tiled_mm(rows, torch.empty(3, OUT, IN, device="meta"), offs),
        grouped._tiled_mm(rows.t(), rows, offs),
    )
    assert (h.shape, product.shape) == ((9, IN), (3, OUT, OUT))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_changes_no_gradient() -> None:
    """It blanks rows past the end, of which a weight's gradient has none."""
    x, weight, sizes = drawn(9, IN), drawn(3, OUT, IN).requires_grad_(), [1, 0, 1]
    grad = drawn(9, OUT, seed=1)
    (expected,) = torch.autograd.grad(grouped_linear(x, weight, offs_of(sizes)), weight, grad)
    with torch.autograd.detect_anomaly(check_nan=False):
        (got,) = torch.autograd.grad(grouped_linear(x, weight, offs_of(sizes)), weight, grad)
    check_bits("weight", got, expected)


SHAPES = [(IN,), (1, IN), (5, IN), (0, IN), (3, 5, IN), (1, 17, IN), (3, 0, IN), (0, 5, IN), (2, 3, 4, IN)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given", ["weight", "weight and bias", "of each sequence"])
def test_rows_by_themselves_equal_a_linear_layer(shape: tuple[int, ...], given: str) -> None:
    """Values and gradients are those of F.linear; gradients are summed for each sequence, then by the tree."""
    x = drawn(*shape).requires_grad_()
    weight, bias = drawn(5, IN, seed=1).requires_grad_(), drawn(5, seed=2).requires_grad_()
    leaves = [x, weight] if given == "weight" else [x, weight, bias]
    num_sequences = max(1, x.shape[:-2].numel())
    if given == "of each sequence":
        copies = (for_each_sequence(weight, num_sequences), for_each_sequence(bias, num_sequences))
        y = row_wise_linear(x, *copies)
    else:
        y = row_wise_linear(*leaves)
    expected = F.linear(*leaves)
    torch.testing.assert_close(y, expected)
    grad = drawn(*y.shape, seed=3)
    got = torch.autograd.grad(y, leaves, grad)
    torch.testing.assert_close(got, torch.autograd.grad(expected, leaves, grad))
    if x.dim() > 2 and x.numel():
        pieces = zip(x.detach().flatten(0, -3), grad.flatten(0, -3), strict=True)
        each = [torch.autograd.grad(row_wise_linear(s, *leaves[1:]), leaves[1:], g) for s, g in pieces]
        for name, whole, parts in zip(("weight", "bias"), got[1:], zip(*each, strict=True), strict=False):
            check_bits(name, whole, tree_sum(torch.stack(parts)))


def test_gradients_of_wide_weights_are_summed_wide() -> None:
    """A weight in fp32 gets the sum of its sequences' bf16 gradients in fp32; ones in bf16 are rounded once."""
    x = drawn(3, 5, IN, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        weight = drawn(5, IN, dtype=dtype, seed=1).requires_grad_()
        y = row_wise_linear(x, weight)
        assert y.dtype is torch.bfloat16
        (got,) = torch.autograd.grad(y.sum(), weight)
        copies = weight.detach().bfloat16().expand(3, -1, -1).clone().requires_grad_()
        (each,) = torch.autograd.grad(row_wise_linear(x, copies).sum(), copies)
        check_bits("gradient", got, tree_sum(each.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_row_s_sigmoid_does_not_depend_on_others(dtype: torch.dtype) -> None:
    for width in (1, 7, 63, 64, 65, 100, 128):
        x = 4 * drawn(9, width, dtype=dtype)
        y = row_wise_sigmoid(x)
        torch.testing.assert_close(y, x.sigmoid())
        for start, end in ((0, 1), (3, 4), (1, 3), (4, 9)):
            check_bits(f"{width} columns", row_wise_sigmoid(x[start:end]), y[start:end])
        with Seen() as seen:
            row_wise_sigmoid(x)
        assert bool(seen.ops) == bool(width % 64), "whole vectors are not copied"
        assert row_wise_sigmoid(x[:0]).shape == (0, width)


@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_sums_of_an_expert_s_rows(capability: Any, sizes: list[int]) -> None:
    """Sums are of real rows, and have tangents, but no second derivatives."""
    real = sum(sizes)
    capability(8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = drawn(real + 3, 3, dtype=dtype)
        rows[real:] = torch.nan
        expected = torch.stack([part.double().sum(0) for part in rows[:real].split(sizes)])
        for summed in (grouped._grouped_sum, grouped._grouped_sum_on_gpu):
            got = summed(rows, offs_of(sizes))
            torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=0.1 if dtype is torch.bfloat16 else 1e-5)
            assert got.is_contiguous()
            assert got.dtype is dtype

    def add_up(rows: Tensor) -> Tensor:
        return torch.ops.moe_rt.grouped_sum(rows, offs_of(sizes))  # type: ignore[no-any-return]

    rows, moved = drawn(real + 3, 3), drawn(real + 3, 3, seed=1)
    torch.testing.assert_close(torch.func.jvp(add_up, (rows,), (moved,)), (add_up(rows), add_up(moved)))
    with pytest.raises(InvalidInput, match=r"^grouped_sum: got a second derivative, expected first ones only"):
        add_up(rows.requires_grad_()).sum().backward()


def test_second_derivatives_of_a_weight_are_refused() -> None:
    """The gradient of a weight is a product, too."""
    x, weight, offs = drawn(9, IN).requires_grad_(), drawn(3, OUT, IN).requires_grad_(), offs_of([4, 0, 5])
    (grad,) = torch.autograd.grad(grouped_linear(x, weight, offs).square().sum(), weight, create_graph=True)
    with pytest.raises(InvalidInput, match=r"^grouped_mm: got a second derivative, expected first ones only"):
        grad.sum().backward()
