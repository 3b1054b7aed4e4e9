"""Grouped linear layers over packed rows: one matrix product per expert, sync-free on a GPU, real rows only.

Rows past `offs[-1]` of a receive buffer are unspecified. No product and no sum here reads them, so no garbage can reach
a gradient. torch's FlopCounterMode counts the operations of real rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from moe_rt.engine.differentiation import SECOND_DERIVATIVE, Args, differentiate, refuse_call
from moe_rt.engine.storage import blank
from moe_rt.errors import expect
from moe_rt.ops.tree_sums import for_each_sequence

_lib = torch.library.Library("moe_rt", "FRAGMENT")
_lib.define("grouped_mm(Tensor a, Tensor b, Tensor offs, bool row_wise=False) -> Tensor")
_lib.define("grouped_add(Tensor rows, Tensor bias, Tensor offs) -> Tensor")
_lib.define("grouped_sum(Tensor rows, Tensor offs) -> Tensor")


# Rows and columns of a product are filled up to multiples of this, if a row's bits must not depend on the other rows:
# MKL sums the rest of either in another order. In fp64 its order on Intel's processors depends on the number of rows,
# so each product in fp64 has this many.
TILE = 16
WHOLE_VECTORS = 64  # elements: a multiple of what torch's element-wise loops take at once, of any type


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    row_wise: bool = False,
    multiply: Callable[[Tensor, Tensor, Tensor, bool], Tensor] | None = None,
) -> Tensor:
    """Each expert's rows times its own weight: y[rows of e] = x[rows of e] @ weight[e].T + bias[e].

    Args:
        x: [rows, in], rows of expert e at offs[e - 1]:offs[e].
        weight: [L, out, in], or [L, in, out] if transposed. Neither is copied.
        offs: int32 [L], inclusive.
        bias: [L, out]; its gradient sums an expert's rows as a matrix product does.
        row_wise: on the CPU the bits of a row of y, and of the gradient of x, depend only on that row and its weight.
            Products are filled up to multiples of 16 rows and columns for that.
        multiply: replaces the op grouped_mm, and has its arguments (`moe_rt.ops.late_weights`).

    Returns:
        [rows, out]; rows past offs[-1] are unspecified.

    Raises:
        InvalidConfig: row_wise, and torch has more than one thread on this CPU.
    """
    b = weight if transposed else weight.mT
    y: Tensor = (multiply or torch.ops.moe_rt.grouped_mm)(x, b, offs, row_wise)
    return y if bias is None else torch.ops.moe_rt.grouped_add(y, bias, offs)


def row_wise_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias like F.linear; each row's bits depend only on that row.

    Gradients of weight and bias are summed for each sequence, then by `moe_rt.ops.tree_sums.tree_sum`, in the wider of
    their own dtype and x's.

    Args:
        x: [..., sequence, in] on the CPU; [in] and [sequence, in] are one sequence.
        weight, bias: [out, in] and [out], or those of `for_each_sequence`; they are cast to x's dtype.

    Raises:
        InvalidConfig: torch has more than one thread.
    """
    num_sequences = max(1, x.shape[:-2].numel())
    rows = x.reshape(-1, x.shape[-1])
    ends = torch.arange(1, num_sequences + 1, dtype=torch.int32) * (len(rows) // num_sequences)

    def copied(t: Tensor, dim: int) -> Tensor:
        return (for_each_sequence(t, num_sequences, x.dtype) if t.dim() == dim else t).to(x.dtype)

    y = grouped_linear(rows, copied(weight, 2), ends, None if bias is None else copied(bias, 1), row_wise=True)
    return y.view(*x.shape[:-1], weight.shape[-2])


def row_wise_sigmoid(x: Tensor) -> Tensor:
    """Return x.sigmoid(); each row's bits depend only on that row, as rows are filled up to whole vectors."""
    num_columns = x.shape[-1]
    fill = -num_columns % WHOLE_VECTORS
    return F.pad(x, (0, fill)).sigmoid()[..., :num_columns] if fill else x.sigmoid()


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, row_wise: bool = False) -> Tensor:
    """[rows, K] x [L, K, N] -> [rows, N], or [M, rows] x [rows, N] -> [L, M, N], like torch's grouped_mm."""
    widen = not _cpu_multiplies(a.dtype)
    row_wise = row_wise and b.dim() == 3
    if row_wise:
        _require_one_thread()
    if not widen and not row_wise and _kernel_takes(a) and _kernel_takes(b):
        return _grouped_mm_of_torch(a, b, offs)
    spans = _spans(offs)
    product = _mm_in_fp32 if widen else torch.mm
    if b.dim() == 2:
        return torch.stack([product(a[:, i:j], b[i:j]) for i, j in spans])
    if b.stride(0) == 0:  # copies of one weight
        spans = [(0, spans[-1][1])]
    out = blank(a.new_empty(a.shape[0], b.shape[2]))
    for e, (i, j) in enumerate(spans):
        if row_wise and i < j:
            _multiply_rows(product, a[i:j], b[e], out[i:j])
        elif i < j:
            product(a[i:j], b[e], out=out[i:j])
    return out


def _require_one_thread() -> None:
    """Raise InvalidConfig if MKL could divide a row's sum among threads: it does, by the number of rows."""
    threads = torch.get_num_threads()
    how = "one: torch.set_num_threads(1), or OMP_NUM_THREADS=1"
    expect(threads == 1, "sums", f'"invariant" with {threads} threads of torch', how)


def _multiply_rows(product: Callable[..., Tensor], a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b to `out`, so that each row's bits depend only on that row of a: see TILE."""
    num_rows, num_columns = out.shape
    if num_columns % TILE:
        b = F.pad(b, (0, -num_columns % TILE))
    whole = num_rows - num_rows % TILE
    at_once = TILE if a.dtype is torch.float64 else max(whole, 1)
    for first in range(0, whole, at_once):
        rows = slice(first, first + at_once)
        if num_columns % TILE:
            out[rows] = product(a[rows], b)[:, :num_columns]
        else:
            product(a[rows], b, out=out[rows])
    if whole < num_rows:
        rest = F.pad(a[whole:], (0, 0, 0, -num_rows % TILE))
        out[whole:] = product(rest, b)[: num_rows - whole, :num_columns]


def _grouped_mm_of_torch(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out = F.grouped_mm(a, b, offs=offs)
    return out if b.dim() == 2 else _blank_past_end(out, offs)


def _blank_past_end(rows: Tensor, offs: Tensor) -> Tensor:
    """Blank rows past the end of existing rows; see `blank`."""
    if torch.is_anomaly_enabled():
        rows.masked_fill_((torch.arange(len(rows), device=rows.device) >= offs[-1])[:, None], 0)
    return rows


@functools.cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """True if torch does more than plain loops for this dtype here: those take up to 80 times fp32's time."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def _mm_in_fp32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply in fp32 and round once, like a product that accumulates in fp32."""
    wide = torch.mm(a.float(), b.float())
    return wide.to(a.dtype) if out is None else out.copy_(wide)


def _kernel_takes(t: Tensor) -> bool:
    """True if torch's CPU kernel takes the tensor: no fp64, and strides and address in multiples of 16 bytes.

    One stride must be 1, and no other: those of a single column are too short for the kernel.
    """
    aligned = all(s == 1 or s * t.itemsize % 16 == 0 for s in t.stride()) and t.data_ptr() % 16 == 0
    return t.dtype is not torch.float64 and aligned and t.stride()[-2:].count(1) == 1


def _spans(offs: Tensor) -> list[tuple[int, int]]:
    """Return the first row and the end of each expert. Waits for offs, so for CPU tensors only."""
    return list(pairwise([0, *offs.tolist()]))


def _grouped_mm_on_gpu(a: Tensor, b: Tensor, offs: Tensor, *_: bool) -> Tensor:
    """Compute _grouped_mm without waiting for offs on the host. `row_wise` changes nothing here."""
    if not (_gpu_kernel_takes(a) and _gpu_kernel_takes(b) and b.shape[-1] * b.itemsize % 16 == 0):
        return _tiled_mm(a, b, offs)
    out = _grouped_mm_of_torch(a, b, offs)
    if b.dim() == 2:
        # torch's kernel leaves the products of experts without rows unwritten on compute capability 10, possibly NaN.
        # https://github.com/pytorch/pytorch/issues/172439
        out.masked_fill_((offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None], 0)
    return out


def _gpu_kernel_takes(t: Tensor) -> bool:
    """True if torch does not read offs on the host, as for other dtypes and GPUs, nor pad or refuse unaligned rows."""
    if t.dtype is not torch.bfloat16 or _compute_capability(t.device)[0] not in (9, 10) or t.numel() == 0:
        return False
    aligned = all(s == 1 or (s > 0 and s * t.itemsize % 16 == 0) for s in t.stride()) and t.data_ptr() % 16 == 0
    return aligned and t.stride()[-2:].count(1) == 1


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _tiled_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute grouped_mm as one bmm whose size is known without offs.

    Every expert's rows are cut into tiles of rows / L. Any distribution of rows gives at most 2 L tiles: twice the work
    of all rows, and each tile reads a copy of its expert's weight.
    """
    num_local, rows = offs.shape[0], b.shape[0] if b.dim() == 2 else a.shape[0]
    if rows == 0:
        return a.new_zeros(num_local, a.shape[0], b.shape[1]) if b.dim() == 2 else a.new_zeros(0, b.shape[2])
    height = -(-rows // num_local)
    bounds = F.pad(offs.long(), (1, 0))
    tile_bounds = F.pad(((bounds.diff() + (height - 1)) // height).cumsum(0), (1, 0))
    tile = torch.arange(2 * num_local, device=a.device)
    expert = torch.searchsorted(tile_bounds[1:], tile, right=True).clamp_(max=num_local - 1)
    first_row = bounds[expert] + (tile - tile_bounds[expert]) * height
    row = first_row[:, None] + torch.arange(height, device=a.device)
    unreal = row >= bounds[expert + 1][:, None]
    source = row.clamp(max=rows - 1)
    if b.dim() == 3:
        out = blank(a.new_empty(rows + 1, b.shape[2]))  # the last row takes results that belong to no row
        out[row.masked_fill(unreal, rows)] = torch.bmm(a[source], b[expert])
        return out[:rows]
    # Values past an expert's rows must be masked, not just multiplied by zero: they may be NaN.
    left, right = (t[source].masked_fill_(unreal[..., None], 0) for t in (a.t(), b))
    product = torch.bmm(left.mT, right)
    # If an expert has three or more tiles, torch's index_add_ decides the order of their sum.
    return a.new_zeros(num_local, *product.shape[1:]).index_add_(0, expert, product)


def _grouped_add(rows: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Add the bias of each row's expert: rows [n, N] + bias [L, N]."""
    out = blank(torch.empty_like(rows))
    for e, (i, j) in enumerate(_spans(offs)):
        torch.add(rows[i:j], bias[e], out=out[i:j])
    return out


def _grouped_add_on_gpu(rows: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Add to all rows: those past the end get the last expert's bias, and stay garbage."""
    row = torch.arange(rows.shape[0], device=rows.device, dtype=offs.dtype)
    out = rows + bias[torch.searchsorted(offs, row, right=True).clamp_(max=offs.shape[0] - 1)]
    return _blank_past_end(out, offs)


def _grouped_sum(rows: Tensor, offs: Tensor) -> Tensor:
    return _sum_by(_grouped_mm, rows, offs)


def _grouped_sum_on_gpu(rows: Tensor, offs: Tensor) -> Tensor:
    return _sum_by(_grouped_mm_on_gpu, rows, offs)


def _sum_by(product: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, offs: Tensor) -> Tensor:
    """Sum each expert's rows: [n, N] -> [L, N].

    The sum is a product with ones, which neither waits for offs nor reads past the end. Kernels need 16-byte rows, so
    the ones fill 16 bytes of columns.
    """
    ones = rows.new_ones(rows.shape[0], 16 // rows.itemsize).t()
    return product(ones, rows.contiguous(), offs)[:, 0].contiguous()


for _name, _on_cpu, _on_gpu in (
    ("grouped_mm", _grouped_mm, _grouped_mm_on_gpu),
    ("grouped_add", _grouped_add, _grouped_add_on_gpu),
    ("grouped_sum", _grouped_sum, _grouped_sum_on_gpu),
):
    _lib.impl(_name, _on_cpu, "CPU")
    _lib.impl(_name, _on_gpu, "CUDA")


@torch.library.register_fake("moe_rt::grouped_mm", lib=_lib)
def _(a: Tensor, b: Tensor, offs: Tensor, *_: bool) -> Tensor:
    if b.dim() == 2:
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])


@torch.library.register_fake("moe_rt::grouped_add", lib=_lib)
def _(rows: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    return torch.empty_like(rows)


@torch.library.register_fake("moe_rt::grouped_sum", lib=_lib)
def _(rows: Tensor, offs: Tensor) -> Tensor:
    return rows.new_empty(offs.shape[0], rows.shape[1])


@register_flop_formula(torch.ops.moe_rt.grouped_mm, get_raw=True)
def _count_flops(a: Tensor, b: Tensor, offs: Tensor, *_: bool, out_val: Tensor) -> int:
    """Count the operations of real rows, or of all rows if offs has no data."""
    among_all = a.shape[1] if b.dim() == 2 else a.shape[0]
    rows = among_all if is_fake(offs) or offs.is_meta else int(offs[-1])
    return 2 * rows * b.shape[-1] * (a.shape[0] if b.dim() == 2 else a.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.row_wise = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_grouped_mm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    if b.dim() == 2:  # the gradient of a weight
        refuse_call(f"grouped_mm: {SECOND_DERIVATIVE}")
    grad = grad.contiguous()  # the gradient of a bare sum() is an expanded scalar, whose strides no kernel takes
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.moe_rt.grouped_mm(grad, b.mT, offs, ctx.row_wise)
    if ctx.needs_input_grad[1]:
        grad_b = _gradient_of_weight(a, grad, offs, b.is_contiguous())
    return grad_a, grad_b, None, None


def _gradient_of_weight(a: Tensor, grad: Tensor, offs: Tensor, contiguous: bool) -> Tensor:
    """Return the gradient in the parameter's memory layout: autograd would copy any other."""
    if contiguous:
        return torch.ops.moe_rt.grouped_mm(a.t(), grad, offs)
    return torch.ops.moe_rt.grouped_mm(grad.t(), a, offs).mT


def add_gradient_of_weight(total: Tensor | None, a: Tensor, grad: Tensor, offs: Tensor, contiguous: bool) -> Tensor:
    """Return the sum of `total`, which is overwritten, and a weight's gradient [L, in, out].

    Args:
        total: an earlier result, or None for zeros.
        a, grad, offs: operands of the gradient.
        contiguous: the weight's own layout is [L, in, out].
    """
    if total is None:
        return _gradient_of_weight(a, grad, offs, contiguous)
    if a.device.type != "cpu" or not _cpu_multiplies(a.dtype):
        return total.add_(_gradient_of_weight(a, grad, offs, contiguous))
    left, right, sums = (a, grad, total) if contiguous else (grad, a, total.mT)
    for e, (i, j) in enumerate(_spans(offs)):
        if i < j:
            sums[e].addmm_(left[i:j].t(), right[i:j])
    return total


def _tangent_of_grouped_mm(args: Args, tangents: Args) -> Tensor:
    a, b, offs, *row_wise = args  # torch leaves out what has its default
    parts = [(tangents[0], b), (a, tangents[1])]
    products = [
        torch.ops.moe_rt.grouped_mm(*part, offs, *row_wise)
        for part in parts
        if part[0] is not None and part[1] is not None
    ]
    return products[0] if len(products) == 1 else products[0] + products[1]


def _save_grouped_add(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _differentiate_grouped_add(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offs,) = ctx.saved_tensors
    return grad, torch.ops.moe_rt.grouped_sum(grad, offs) if ctx.needs_input_grad[1] else None, None


def _tangent_of_grouped_add(args: Args, tangents: Args) -> Tensor:
    rows, bias = (
        torch.zeros_like(t) if tangent is None else tangent for t, tangent in zip(args[:2], tangents[:2], strict=True)
    )
    return torch.ops.moe_rt.grouped_add(rows, bias, args[2])


def _differentiate_grouped_sum(ctx: Any, grad: Tensor) -> NoReturn:
    refuse_call(f"grouped_sum: {SECOND_DERIVATIVE}")


def _tangent_of_grouped_sum(args: Args, tangents: Args) -> Tensor:
    return torch.ops.moe_rt.grouped_sum(tangents[0], args[1])


for _name, _backward, _set_up, _rule in (
    ("grouped_mm", _differentiate_grouped_mm, _save, _tangent_of_grouped_mm),
    ("grouped_add", _differentiate_grouped_add, _save_grouped_add, _tangent_of_grouped_add),
    ("grouped_sum", _differentiate_grouped_sum, None, _tangent_of_grouped_sum),
):
    differentiate(_lib, _name, _backward, _set_up, tangents=_rule)
