"""CPU tensors that pass for CUDA tensors: values are real, and an op that mixes both kinds fails, as on a GPU.

It needs a dedicated process, since the guard it loads stays. Autograd's engine refuses CUDA in a torch without it, so
only forward code can run.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from support.cpp_programs import compile_program
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
BETWEEN_DEVICES = ("aten._to_copy", "aten.copy_")
# Parts of names of ops that wait for the device: the host then knows a value, or a shape that depends on one.
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave", "bincount", "item", "equal")


def build_guard() -> Path:
    """Build noop_guard.cpp and return the library."""
    torch_files = Path(torch.__file__).parent
    paths = [f"-isystem{torch_files}/include", f"-L{torch_files}/lib", "-lc10", f'-DTORCH="{torch.__version__}"']
    return compile_program(Path(__file__).with_name("noop_guard.cpp"), "-shared", "-fPIC", *paths)


class OnDevice(Tensor):
    """A tensor on the pretended device; `held` is the CPU tensor with its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        wrapper = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=DEVICE, **layout)
        wrapper.held = held
        return wrapper

    __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: perform(func, args, kwargs or {}))

    def tolist(self) -> Any:  # torch refuses this to all wrapper tensors
        return self.held.tolist()


class PretendCuda(TorchDispatchMode):
    """While active, a device argument of CUDA is accepted.

    Args:
        guard: the library from `build_guard`.
    """

    def __init__(self, guard: Path) -> None:
        super().__init__()
        ctypes.CDLL(str(guard))
        torch.cuda._lazy_init = lambda: None
        torch.__future__.set_overwrite_module_params_on_conversion(True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


def perform(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the op on the held tensors. Outputs are on the requested device, or else on the device of the inputs."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    wrappers = {id(t.held): t for t in tensors if isinstance(t, OnDevice)}
    strangers = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]  # scalars may be on any device
    between = str(func).startswith(BETWEEN_DEVICES)
    assert between or not (wrappers and strangers), f"{func} of tensors on CPU and CUDA"
    device = kwargs.get("device")
    kwargs = kwargs if device is None else {**kwargs, "device": torch.device("cpu")}
    on_device = bool(wrappers) if device is None else torch.device(device).type == "cuda"
    plain_args, plain_kwargs = tree_map(lambda t: t.held if isinstance(t, OnDevice) else t, (args, kwargs))

    def wrapped(out: Any) -> Any:
        if not (isinstance(out, Tensor) and on_device):
            return out
        return wrappers[id(out)] if id(out) in wrappers else OnDevice(out)

    return tree_map(wrapped, func(*plain_args, **plain_kwargs))
