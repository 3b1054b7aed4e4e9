"""Changes torch so that CUDA devices are the CPU: factories, moves between devices, autocast, loading, DDP."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.utils._device import _device_constructors

from moe_rt.lab.on_cpu import cuda, groups
from moe_rt.lab.on_cpu.devices import REAL_DEVICE, Generator, cpu_of, device, first_mapped, made_by, mapped


def change() -> None:
    """Change torch in this process."""
    constructors = _device_constructors()  # a cached set, which torch.set_default_device needs with the real functions
    for name in dir(torch):
        fn = getattr(torch, name)
        if callable(fn) and (name.endswith("_like") or (_hashable(fn) and fn in constructors)):
            setattr(torch, name, mapped(fn))
    torch.device, torch.Generator = device, Generator  # type: ignore[misc]
    torch.Stream, torch.Event = made_by(torch.Stream, cuda.Stream), made_by(torch.Event, cuda.Event)  # type: ignore[misc]
    torch.load = mapped(torch.load, "map_location")
    torch.set_default_device = first_mapped(torch.set_default_device)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.accelerator.current_accelerator = lambda check_available=False: None  # torch built for CUDA has one
    # DataParallel without devices runs its module once. A function hides the module that it is in.
    vars(sys.modules["torch.nn.parallel.data_parallel"])["_get_available_device_type"] = lambda: None
    _change_lookups()
    _change_tensors()
    _change_autocast()
    _change_operators()
    _change_profiler()
    _hide_triton()
    cuda.change()
    groups.change()


def _change_lookups() -> None:
    """Change functions that find a module or a class by the name of a device."""
    named: Any = torch
    find, fork, set_type = named.get_device_module, named.random.fork_rng, named.set_default_tensor_type
    of_type: Any = torch.Tensor.type

    @functools.wraps(find)
    def module_of(device: Any = None) -> Any:
        return torch.cuda if cpu_of(device) is not device else find(device)

    @functools.wraps(fork)
    def fork_on_cpu(devices: Any = None, *arguments: Any, **keywords: Any) -> Any:
        return fork((), *arguments, **keywords)  # the CPU's generator, which it always restores, is the only one

    named.get_device_module, named.random.fork_rng = module_of, fork_on_cpu
    named.set_default_tensor_type = functools.wraps(set_type)(lambda kind: set_type(_cpu_type(kind)))
    tensor: Any = torch.Tensor
    tensor.type = functools.wraps(of_type)(lambda self, dtype=None, *a, **k: of_type(self, _cpu_type(dtype), *a, **k))


def _cpu_type(kind: Any) -> Any:
    """Return the CPU's name for the name of a CUDA type of tensors, and anything else unchanged."""
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


def _change_tensors() -> None:
    tensor: Any = torch.Tensor
    to = tensor.to

    @functools.wraps(to)
    def moved(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = keywords.get("device", arguments[0] if arguments else None)
        if type(given) is not int and not isinstance(given, str | REAL_DEVICE):
            return to(self, *arguments, **keywords)
        if "device" in keywords:
            keywords["device"] = cpu_of(given)
        else:
            arguments = (cpu_of(given), *arguments[1:])
        there = to(self, *arguments, **keywords)
        return _copy(self) if there is self else there

    def to_cuda(self: Any, device: Any = None, *arguments: Any, **keywords: Any) -> Any:
        cpu_of(device)  # raises if there are fewer
        return _copy(self)

    tensor.to, tensor.cuda = moved, to_cuda
    tensor.cpu = lambda self, *arguments, **keywords: _copy(self)
    tensor.pin_memory = lambda self, *arguments, **keywords: _copy(self)
    tensor.is_pinned = lambda self, *arguments, **keywords: True
    tensor.record_stream = lambda self, stream: None
    tensor.get_device = lambda self: torch.cuda.current_device()
    tensor.is_cuda = property(lambda self: self.device.type != "meta")
    for name in ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(tensor, name, mapped(getattr(tensor, name)))


def _copy(t: Any) -> Any:
    """Return a copy, as a move between devices does. A leaf with gradients stays itself, so that it remains a leaf."""
    return t if t.requires_grad and t.is_leaf else t.clone()


def _change_autocast() -> None:
    autocast: Any = torch.amp.autocast_mode.autocast
    start = autocast.__init__

    @functools.wraps(start)
    def begin(self: Any, device_type: str, dtype: Any = None, *arguments: Any, **keywords: Any) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = torch.float16  # CUDA's default
        start(self, cpu_of(device_type), dtype, *arguments, **keywords)

    autocast.__init__ = begin
    for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        setattr(torch, name, first_mapped(getattr(torch, name), "device_type"))
    scaler: Any = torch.amp.GradScaler
    scaler.__init__ = first_mapped(scaler.__init__, "device", 1)
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    make = ddp.__init__

    @functools.wraps(make)
    def make_on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *arguments: Any, **keywords: Any
    ) -> None:
        make(self, module, None, None, *arguments, **keywords)

    ddp.__init__ = make_on_cpu


def _change_operators() -> None:
    """Make kernels that are registered for CUDA those of the CPU, unless an operator has one for it."""
    library: Any = torch.library.Library
    register = library.impl

    @functools.wraps(register)
    def on_cpu(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **keywords: Any) -> Any:
        if dispatch_key == "CUDA":
            name = op_name if isinstance(op_name, str) else op_name._schema.name
            name = name if "::" in name else f"{self.ns}::{name}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
                return None
            dispatch_key = "CPU"
        return register(self, op_name, fn, dispatch_key, **keywords)

    library.impl = on_cpu
    custom: Any = torch._library.custom_ops.CustomOpDef
    custom.register_kernel = first_mapped(custom.register_kernel, "device_types", 1)


def _change_profiler() -> None:
    """Profile the CPU where a program asks for CUDA."""
    profile: Any = torch.profiler.profile
    start, kinds = profile.__init__, torch.profiler.ProfilerActivity

    @functools.wraps(start)
    def begin(self: Any, *, activities: Any = None, **keywords: Any) -> None:
        cpu = None if activities is None else {kinds.CPU if each is kinds.CUDA else each for each in activities}
        start(self, activities=cpu, **keywords)

    profile.__init__ = begin


def _hide_triton() -> None:
    """Keep torch's compiler from the stand-in for triton."""
    from torch.utils import _triton

    for name in ("has_triton_package", "has_triton"):
        if hasattr(_triton, name):
            setattr(_triton, name, functools.cache(lambda: False))


def _hashable(value: object) -> bool:
    return getattr(type(value), "__hash__", None) is not None
