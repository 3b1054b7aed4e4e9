"""The GPU code of experts: SwiGLU over real rows, and matrix products that leave row counts on the device."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device.jit_tools import require_compiler
from support.emulated_gpu import EmulatedGpu, library
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt.config.tuning import ACTIVATION_BLOCKS_PER_SM, ACTIVATION_THREADS
from moe_rt.engine.gpu.jit import compile_kernels, compile_ptx
from moe_rt.engine.gpu.launcher import ELEMENT_NAMES
from moe_rt.errors import InvalidInput
from moe_rt.nn import experts
from moe_rt.ops import cuda_activation, grouped

pytestmark = pytest.mark.emulated("calls emulated kernels")
DTYPES = list(ELEMENT_NAMES)
FEW_DTYPES = (torch.float32, torch.bfloat16)
ROWS = 13
SPREADS = [[4, 0, 5], [0, 0, 0], [0, 13, 0], [1], [13]]
# Multiples of a 16-byte vector for every dtype, for some, and for none.
WIDTHS = [1, 7, 8, 10, 24]
SENTINEL = 7.0
# Indexing and autograd need a device guard, which exists only in a torch built for the device.
TRACED = "cuda" if torch.cuda.is_available() else "cpu"
seeds = itertools.count(1)


def run_kernel(name: str, dtype: torch.dtype, words: tuple[int, ...], blocks: int, threads: int) -> None:
    args = (ctypes.c_uint64 * len(words))(*words)
    backward, elem = name == "swiglu_backward", ELEMENT_NAMES[dtype].encode()
    library().emulated_activation(int(backward), elem, blocks, threads, args, next(seeds))


class EmulatedActivation:
    """Kernels of activation.cu on an emulated GPU."""

    def __init__(self, gpu: EmulatedGpu, defines: Mapping[str, str | int]) -> None:
        self.gpu, self.elem = gpu, str(defines["MOE_RT_ELEM"])

    def launch(self, launches: Any, *, params: ctypes.Array[Any], **_: Any) -> None:
        ((name, blocks),) = launches
        self.gpu.launched.append(f"{name} {self.elem} {blocks}")
        backward = int(name == "swiglu_backward")
        library().emulated_activation(
            backward, self.elem.encode(), blocks, self.gpu.threads, ctypes.c_void_p(params[0]), next(seeds)
        )


class ActivationGpu(EmulatedGpu):
    def kernels(self, source: str, defines: Mapping[str, str | int], **_: Any) -> Any:
        assert source == "activation.cu"
        return EmulatedActivation(self, defines)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ActivationGpu:
    """Emulated GPU in place of the device of CPU tensors."""
    gpu = ActivationGpu(num_sms=2)
    monkeypatch.setattr(cuda_activation, "Gpu", lambda device: gpu)
    monkeypatch.setattr(cuda_activation, "_gpus", {})
    monkeypatch.setattr(cuda_activation, "_kernels", {})
    return gpu


def offs_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def rows_from(place: int, num_rows: int, width: int, dtype: torch.dtype, real: int) -> Tensor:
    """Return random rows that start `place` elements into their memory; rows past the real ones are NaN."""
    memory = torch.empty(place + num_rows * width, dtype=dtype)
    rows = memory[place:].view(num_rows, width)
    rows.copy_(3 * torch.randn(num_rows, width, dtype=torch.float64))
    rows[real:] = float("nan")
    return rows


def close_to_exact(got: Tensor, exact: Tensor) -> None:
    """Check to one unit in the last place of the dtype; fp32 and fp64 also lose a little before their one rounding."""
    eps = torch.finfo(got.dtype).eps
    slack = {torch.float32: 8, torch.float64: 16}.get(got.dtype, 0.51)
    torch.testing.assert_close(
        got.double(), exact, rtol=slack * eps, atol=1e-14 if got.dtype == torch.float64 else 1e-6
    )


def exact_swiglu(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and gradient in fp64."""
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    out = F.silu(gate) * up
    return out.detach(), torch.autograd.grad(out, leaf, grad.double())[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("place", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_kernels_touch_only_real_rows(dtype: torch.dtype, width: int, place: int, sizes: list[int]) -> None:
    torch.manual_seed(width)
    offs = offs_of(sizes)
    n = int(offs[-1])
    gate_up = rows_from(place, ROWS, 2 * width, dtype, n)
    grad = rows_from(place, ROWS, width, dtype, n)
    exact, exact_grad = exact_swiglu(gate_up[:n], grad[:n])
    common = (offs.data_ptr(), len(offs), ROWS, width)
    for blocks, threads in ((1, 1), (1, 4), (3, 3)):
        out, grad_gate_up = (rows_from(place, *t.shape, dtype, 0).fill_(SENTINEL) for t in (grad, gate_up))
        run_kernel("swiglu_forward", dtype, (gate_up.data_ptr(), *common, out.data_ptr()), blocks, threads)
        words = (grad.data_ptr(), gate_up.data_ptr(), *common, grad_gate_up.data_ptr())
        run_kernel("swiglu_backward", dtype, words, blocks, threads)
        close_to_exact(out[:n], exact)
        close_to_exact(grad_gate_up[:n], exact_grad)
        assert (out[n:] == SENTINEL).all()
        assert (grad_gate_up[n:] == SENTINEL).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_and_single_elements_give_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    aligned = rows_from(0, ROWS, 48, dtype, ROWS)
    unaligned = rows_from(1, ROWS, 48, dtype, ROWS).copy_(aligned)
    offs, outs = offs_of([ROWS]), []
    for gate_up in (aligned, unaligned):
        out = torch.empty(ROWS, 24, dtype=dtype)
        words = (gate_up.data_ptr(), offs.data_ptr(), 1, ROWS, 24, out.data_ptr())
        run_kernel("swiglu_forward", dtype, words, 2, 2)
        outs.append(out)
    assert torch.equal(*outs)


def test_offsets_past_the_tensor_do_no_harm() -> None:
    offs = offs_of([5])
    gate_up, out = torch.randn(5, 16), torch.full((5, 8), SENTINEL)
    run_kernel("swiglu_forward", torch.float32, (gate_up.data_ptr(), offs.data_ptr(), 1, 3, 8, out.data_ptr()), 2, 2)
    assert (out[:3] != SENTINEL).all()
    assert (out[3:] == SENTINEL).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates(dtype: torch.dtype) -> None:
    """Gates far below zero, for which exp overflows, give zero and not NaN, as in torch."""
    big = min(torch.finfo(dtype).max / 4, 1e5)
    gate = torch.tensor([[-big, -200.0, -20.0, 0.0, 20.0, big]], dtype=dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    grad, offs = torch.ones_like(gate), offs_of([1])
    out, grad_gate_up = torch.empty_like(gate), torch.empty_like(gate_up)
    common = (offs.data_ptr(), 1, 1, 6)
    run_kernel("swiglu_forward", dtype, (gate_up.data_ptr(), *common, out.data_ptr()), 1, 1)
    words = (grad.data_ptr(), gate_up.data_ptr(), *common, grad_gate_up.data_ptr())
    run_kernel("swiglu_backward", dtype, words, 1, 1)
    exact, exact_grad = exact_swiglu(gate_up, grad)
    close_to_exact(out, exact)
    close_to_exact(grad_gate_up, exact_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_from_python(gpu: ActivationGpu, dtype: torch.dtype) -> None:
    """Strided inputs and an expanded gradient work; both kernels compile once, and blocks never exceed vectors or
    capacity."""
    offs = offs_of([4, 0, 5])
    gate_up, grad = rows_from(0, 26, 17, dtype, 18)[::2, 1:], torch.ones((), dtype=dtype).expand(ROWS, 8)
    exact, exact_grad = exact_swiglu(gate_up[:9], grad[:9])
    close_to_exact(cuda_activation.swiglu(gate_up, offs)[:9], exact)
    close_to_exact(cuda_activation.swiglu_backward(grad, gate_up, offs)[:9], exact_grad)
    elem = ELEMENT_NAMES[dtype]
    assert gpu.launched == [f"swiglu_forward {elem} 1", f"swiglu_backward {elem} 1"]
    assert len(cuda_activation._kernels) == 1

    wide = torch.ones(100, 2048, dtype=dtype)
    cuda_activation.swiglu(wide, offs_of([100]))
    assert gpu.launched[-1] == f"swiglu_forward {elem} 8"
    cuda_activation.swiglu(wide[:0], offs_of([0]))
    cuda_activation.swiglu_backward(wide[:0, 1024:], wide[:0], offs_of([0]))
    assert len(gpu.launched) == 3, "nothing to do, nothing launched"


def test_other_dtypes_take_torch(gpu: ActivationGpu) -> None:
    gate_up = torch.randn(5, 16, dtype=torch.complex64)
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(cuda_activation.swiglu(gate_up, offs_of([5])), F.silu(gate) * up)
    assert not gpu.launched


def test_wrong_input_is_refused_before_the_device_sees_it(gpu: ActivationGpu) -> None:
    good, offs = torch.randn(5, 16), offs_of([5])
    with pytest.raises(InvalidInput, match=r"gate_up: got \[5, 15\], expected .* even"):
        cuda_activation.swiglu(good[:, 1:], offs)
    for bad in (offs.long(), offs[:0], torch.empty(1, dtype=torch.int32, device="meta")):
        with pytest.raises(InvalidInput, match=r"offs: got .*, expected torch\.int32 \[L\] on cpu"):
            cuda_activation.swiglu(good, bad)
    with pytest.raises(
        InvalidInput, match=r"grad: got torch\.float64 \[5, 8\] on cpu, expected torch\.float32 \[5, 8\]"
    ):
        cuda_activation.swiglu_backward(good[:, :8].double(), good, offs)
    assert not gpu.launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(13, [4, 0, 5]), (13, [0, 0, 0]), (13, [0, 13, 0]), (13, [6, 6, 1]), (3, [1, 0, 1, 0, 1]), (1, [1]), (0, [0, 0])],
    ids=str,
)
def test_tiles_equal_a_loop(dtype: torch.dtype, rows: int, sizes: list[int]) -> None:
    """The tiled product, which avoids torch's wait for offs, equals a loop, also in the weight's gradient; NaN past the
    end."""
    torch.manual_seed(0)
    offs, real = offs_of(sizes), sum(sizes)
    x, grad = rows_from(0, rows, 6, dtype, real), rows_from(0, rows, 10, dtype, real)
    weight = torch.randn(len(sizes), 10, 6, dtype=dtype)
    spans = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    out = grouped._tiled_mm(x, weight.transpose(1, 2), offs)
    assert out.shape == (rows, 10)
    assert out.is_contiguous()
    for e, (i, j) in enumerate(spans):
        torch.testing.assert_close(out[i:j], x[i:j] @ weight[e].T)
    grad_weight = grouped._tiled_mm(grad.t(), x, offs)
    torch.testing.assert_close(grad_weight, torch.stack([grad[i:j].T @ x[i:j] for i, j in spans]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """No op waits for the device: fake tensors have no values, so a read of one would raise."""
    with FakeTensorMode():
        for mm, device in ((torch.ops.moe_rt.grouped_mm, "cuda"), (grouped._tiled_mm, TRACED)):
            x, grad = (torch.empty(ROWS, n, dtype=dtype, device=device) for n in (16, 32))
            offs = torch.empty(3, dtype=torch.int32, device=device)
            weight = torch.empty(3, 32, 16, dtype=dtype, device=device)
            h, grad_weight = mm(x, weight.transpose(1, 2), offs), mm(grad.t(), x, offs)
            assert (h.shape, h.stride(), h.device, h.dtype) == ((ROWS, 32), (32, 1), x.device, dtype)
            assert (grad_weight.shape, grad_weight.device, grad_weight.dtype) == ((3, 32, 16), x.device, dtype)
        x, h, offs = (torch.empty_like(t, device="cuda") for t in (x, h, offs))
        out = experts.swiglu(h, offs)
        grad_h = torch.ops.moe_rt.swiglu_backward(out, h, offs)
        assert (out.shape, out.device, out.dtype) == ((ROWS, 16), x.device, dtype)
        assert (grad_h.shape, grad_h.device, grad_h.dtype) == (h.shape, x.device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_trace_forward_and_backward(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        module = experts.SwiGLUExperts(3, 16, 8, device=TRACED, dtype=dtype)
        x = torch.empty(ROWS, 16, device=TRACED, dtype=dtype, requires_grad=True)
        module(x, torch.empty(3, dtype=torch.int32, device=TRACED)).sum().backward()
        for t in (x, module.gate_up_proj, module.down_proj):
            assert t.grad is not None
            assert (t.grad.shape, t.grad.device) == (t.shape, t.device)


@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.sweep) for arch in ("sm_80", "sm_100a", "sm_120a"))]
)
@pytest.mark.parametrize(
    "dtype", [d if d in FEW_DTYPES else pytest.param(d, marks=pytest.mark.sweep) for d in DTYPES], ids=str
)
def test_compiles(arch: str, dtype: torch.dtype) -> None:
    require_compiler()
    defines: dict[str, str | int] = {"MOE_RT_ELEM": ELEMENT_NAMES[dtype], "MOE_RT_THREADS": ACTIVATION_THREADS}
    needs = compile_kernels("activation.cu", arch, defines, cache=False).resources
    assert set(needs) == {"swiglu_forward", "swiglu_backward"}
    for kernel in needs.values():
        # All blocks of a launch fit on the GPU together.
        assert kernel.registers * ACTIVATION_THREADS * ACTIVATION_BLOCKS_PER_SM <= 65536
        assert kernel.spill_bytes == 0
    if arch == "sm_90a":
        ptx = compile_ptx("activation.cu", arch, defines)
        assert re.search(r"ld\.global\.v[24]\.", ptx), "rows are read in 16-byte vectors"
        assert re.search(r"st\.global\.v[24]\.", ptx)
