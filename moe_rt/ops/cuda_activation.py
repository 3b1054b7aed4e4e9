"""SwiGLU and its backward on a GPU, over real rows only. Only the device reads how many they are."""

from __future__ import annotations

import ctypes
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt import _engine
from moe_rt.config.tuning import ACTIVATION_BLOCKS_PER_SM, ACTIVATION_THREADS
from moe_rt.engine.gpu.driver import Gpu, Kernels
from moe_rt.engine.gpu.launcher import ELEMENT_NAMES
from moe_rt.engine.storage import blank
from moe_rt.errors import InvalidInput

_VECTOR_BYTES = 16

_lock = threading.Lock()
_gpus: dict[torch.device, Gpu] = {}
_kernels: dict[tuple[torch.device, torch.dtype], Kernels] = {}


def prepare(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Compile and load the kernels, so that no peer has to wait for that during an op. Idempotent.

    Raises:
        CompileError, LaunchFailed: no compiler was found, or the driver refused.
    """
    with _lock:
        if device not in _gpus:
            _gpus[device] = Gpu(device)
        if (device, dtype) not in _kernels:
            defines: dict[str, str | int] = {"MOE_RT_ELEM": ELEMENT_NAMES[dtype], "MOE_RT_THREADS": ACTIVATION_THREADS}
            _kernels[device, dtype] = _gpus[device].kernels("activation.cu", defines)
        return _kernels[device, dtype]


def swiglu(gate_up: Tensor, offs: Tensor) -> Tensor:
    """silu(gate) * up; rows past offs[-1] are neither read nor written.

    Raises:
        InvalidInput: gate and up differ in width, or offs is not int32 on the same device.
    """
    if gate_up.dtype not in ELEMENT_NAMES:
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up
    _check(gate_up, offs)
    gate_up, offs = gate_up.contiguous(), offs.contiguous()
    rows, width = gate_up.shape
    out = blank(gate_up.new_empty(rows, width // 2))
    args = _engine.SwigluArgs(
        gate_up=gate_up.data_ptr(),
        offs=offs.data_ptr(),
        num_local=len(offs),
        num_rows=rows,
        intermediate=width // 2,
        out=out.data_ptr(),
    )
    _launch("swiglu_forward", out, args)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor, offs: Tensor) -> Tensor:
    """Return the gradient of gate_up; rows and errors are those of `swiglu`."""
    if gate_up.dtype not in ELEMENT_NAMES:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], dim=1)
    _check(gate_up, offs)
    rows, width = gate_up.shape
    if grad.shape != (rows, width // 2) or grad.dtype != gate_up.dtype or grad.device != gate_up.device:
        got, expected = f"{grad.dtype} {list(grad.shape)} on {grad.device}", f"{gate_up.dtype} {[rows, width // 2]}"
        raise InvalidInput(f"grad: got {got}, expected {expected} on {gate_up.device}")
    grad, gate_up, offs = grad.contiguous(), gate_up.contiguous(), offs.contiguous()
    out = blank(torch.empty_like(gate_up))
    args = _engine.SwigluBackwardArgs(
        grad=grad.data_ptr(),
        gate_up=gate_up.data_ptr(),
        offs=offs.data_ptr(),
        num_local=len(offs),
        num_rows=rows,
        intermediate=width // 2,
        grad_gate_up=out.data_ptr(),
    )
    _launch("swiglu_backward", out, args)
    return out


def _check(gate_up: Tensor, offs: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise InvalidInput(f"gate_up: got {list(gate_up.shape)}, expected rows of an even number of columns")
    if offs.dtype is not torch.int32 or offs.device != gate_up.device or offs.dim() != 1 or not len(offs):
        got = f"{offs.dtype} {list(offs.shape)} on {offs.device}"
        raise InvalidInput(f"offs: got {got}, expected torch.int32 [L] on {gate_up.device}, L > 0")


def _launch(name: str, out: Tensor, args: _engine.SwigluArgs | _engine.SwigluBackwardArgs) -> None:
    num_vectors = -(-out.numel() * out.itemsize // _VECTOR_BYTES)
    if num_vectors == 0:
        return
    kernels = _kernels.get((out.device, out.dtype)) or prepare(out.device, out.dtype)
    gpu = _gpus[out.device]
    blocks = min(-(-num_vectors // ACTIVATION_THREADS), gpu.num_sms * ACTIVATION_BLOCKS_PER_SM)
    params = (ctypes.c_void_p * 1)(args.address)
    kernels.launch([(name, blocks)], threads=ACTIVATION_THREADS, shared_bytes=0, stream=gpu.stream(), params=params)
