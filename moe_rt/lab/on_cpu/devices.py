"""CUDA devices that are the CPU, however a program names them, and functions whose argument is such a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_rt.lab.on_cpu.hooks import NotOnCpu, num_devices

REAL_DEVICE, _Generator = torch.device, torch.Generator


def cpu_of(device: Any) -> Any:
    """Return the CPU for a CUDA device, however it is named, and anything else unchanged.

    Raises:
        NotOnCpu: there are fewer devices.
    """
    cpu: Any = "cpu"
    if type(device) is int:
        index: int | None = device
    elif isinstance(device, str) and device.partition(":")[0] == "cuda":
        index = REAL_DEVICE(device).index
    elif isinstance(device, REAL_DEVICE) and device.type == "cuda":
        index, cpu = device.index, REAL_DEVICE("cpu")
    else:
        return device
    if index is not None and index >= num_devices():
        raise NotOnCpu(f"device: got cuda:{index}, expected one of {num_devices()} (moe-rt on-cpu --ranks)")
    return cpu


class _Real(type):
    """Makes isinstance and issubclass ask other classes."""

    real: type | tuple[Any, ...]

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.real)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.real)


class device(metaclass=_Real):
    """torch.device, whose CUDA devices are the CPU."""

    real = REAL_DEVICE

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        first = arguments[0] if arguments else keywords.get("type", keywords.get("device"))
        if first is None or type(first) is int:  # the default device, or the index of an accelerator
            return REAL_DEVICE(cpu_of(0 if first is None else first))
        return cpu_of(REAL_DEVICE(*arguments, **keywords))


class Generator(metaclass=_Real):
    """torch.Generator, of which those of CUDA devices are the CPU's."""

    real = _Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator(cpu_of(device))


def made_by(real: type, on_cuda: type) -> Any:
    """Return a class like `real`, whose objects on CUDA devices, and so on the CPU, are those of `on_cuda`."""

    def make(cls: Any, device: Any = None, **keywords: Any) -> Any:
        here = device is None or REAL_DEVICE(cpu_of(device)).type == "cpu"  # that of a tensor on a CUDA device
        return on_cuda(**keywords) if here else real(device, **keywords)

    return _Real(real.__name__, (), {"real": (real, on_cuda), "__new__": make, "__doc__": real.__doc__})


def mapped(fn: Callable[..., Any], keyword: str = "device") -> Callable[..., Any]:
    """Return a function whose keyword argument is mapped to the CPU, and which pins no memory."""

    @functools.wraps(fn)
    def on_cpu(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get(keyword) is not None:
            keywords[keyword] = cpu_of(keywords[keyword])
        keywords.pop("pin_memory", None)
        return fn(*arguments, **keywords)

    return on_cpu


def first_mapped(fn: Callable[..., Any], keyword: str = "device", place: int = 0) -> Callable[..., Any]:
    """Return a function whose argument at a place, or keyword, is mapped to the CPU."""

    @functools.wraps(fn)
    def on_cpu(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > place:
            arguments = (*arguments[:place], cpu_of(arguments[place]), *arguments[place + 1 :])
        elif keyword in keywords:
            keywords[keyword] = cpu_of(keywords[keyword])
        return fn(*arguments, **keywords)

    return on_cpu
