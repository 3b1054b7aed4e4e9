"""torch.distributed on CPU ranks: groups of nccl are gloo's, with what gloo lacks made from what it has."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from moe_rt.lab.on_cpu.devices import first_mapped


def _backend(name: Any) -> Any:
    return "gloo" if name is None or "nccl" in str(name) else name


def _with_gloo(fn: Any) -> Any:
    """Return a function that makes a group with gloo, without a device and without nccl's options."""

    @functools.wraps(fn)
    def make(*arguments: Any, **keywords: Any) -> Any:
        if fn.__name__ == "init_process_group":
            arguments = (_backend(arguments[0]), *arguments[1:]) if arguments else ()
            if not arguments:
                keywords["backend"] = _backend(keywords.get("backend"))
        elif keywords.get("backend") is not None:
            keywords["backend"] = _backend(keywords["backend"])
        for name in ("pg_options", "device_id"):
            if name in keywords:
                keywords[name] = None
        return fn(*arguments, **keywords)

    return make


def _gathered(fn: Any) -> Any:
    """Return all_gather_into_tensor for any shape of as many elements, as nccl has it."""

    @functools.wraps(fn)
    def gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        return fn(_bits(output_tensor.view(-1)), _bits(input_tensor.contiguous().view(-1)), group, async_op)

    return gather


_MOVES = ("all_to_all_single", "all_to_all", "all_gather", "broadcast", "scatter", "gather", "send", "recv", "isend",
          "irecv")  # fmt: skip


def _bits(value: Any) -> Any:
    """Return tensors of 8-bit floats, in lists too, as the bytes that gloo can move."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) if value.is_floating_point() and value.itemsize == 1 else value
    return [_bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def _of_bits(fn: Any) -> Any:
    """Return a function that moves 8-bit floats as bytes."""

    @functools.wraps(fn)
    def move(*arguments: Any, **keywords: Any) -> Any:
        return fn(*map(_bits, arguments), **{name: _bits(value) for name, value in keywords.items()})

    return move


class _Done:
    """Work that is complete."""

    def wait(self, *arguments: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _averaged(fn: Any) -> Any:
    """Return a reduction that also averages, which gloo does not."""

    @functools.wraps(fn)
    def reduce(output: Any, *arguments: Any, **keywords: Any) -> Any:
        names = (
            ("input", "op", "group", "async_op")
            if fn.__name__ == "reduce_scatter_tensor"
            else ("op", "group", "async_op")
        )
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        if given.get("op") != dist.ReduceOp.AVG:
            return fn(output, **given)
        waits = not given.pop("async_op", False)
        fn(output, **{**given, "op": dist.ReduceOp.SUM})
        output.div_(dist.get_world_size(given.get("group")))
        return None if waits else _Done()

    return reduce


def _barrier(fn: Any) -> Any:
    @functools.wraps(fn)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return fn(group, async_op)

    return barrier


class ProcessGroupNCCL:
    """nccl's group. Programs set its options, which groups of gloo do not take."""

    @staticmethod
    def Options(*arguments: Any, **keywords: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace())


def change() -> None:
    """Replace torch.distributed's functions in this process."""
    if not dist.is_available():
        return
    replaced: dict[str, Any] = {name: _with_gloo(getattr(dist, name)) for name in ("init_process_group", "new_group")}
    replaced |= {name: _averaged(getattr(dist, name)) for name in ("all_reduce", "reduce_scatter_tensor")}
    replaced["all_gather_into_tensor"] = _gathered(dist.all_gather_into_tensor)
    replaced |= {name: _of_bits(getattr(dist, name)) for name in _MOVES}
    replaced["barrier"] = _barrier(dist.barrier)
    for name, value in replaced.items():
        setattr(dist, name, value)
        setattr(distributed_c10d, name, value)
    dist.is_nccl_available = lambda: True  # torch itself asks distributed_c10d
    for home in (dist, distributed_c10d):
        if not hasattr(home, "ProcessGroupNCCL"):
            home.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    mesh: Any = device_mesh.DeviceMesh
    mesh.__init__ = first_mapped(mesh.__init__, "device_type", 1)
    device_mesh.init_device_mesh = first_mapped(device_mesh.init_device_mesh, "device_type")
    dist.__dict__["init_device_mesh"] = device_mesh.init_device_mesh
