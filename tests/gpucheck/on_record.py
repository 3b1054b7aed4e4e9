"""Values of gpucheck's tests as JSON has them, and functions whose calls are listed in place of their work."""

from __future__ import annotations

import itertools
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from moe_rt.config.spec import BufferSpec
from moe_rt.lab.testing.rounds import Inputs, make_spec


def plain(value: Any) -> Any:
    """Return a value of JSON; of a dataclass, the fields that differ from its defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in fields(value)}
        return {f.name: plain(found[f.name]) for f in fields(value) if found[f.name] != f.default}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if isinstance(value, (int, str, type(None))) else str(value)


class Named(SimpleNamespace):
    """Something that calls show by its name."""

    def __str__(self) -> str:
        return str(self.name)


class Fakes:
    """Replaces functions for a while, and lists their calls in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.calls = patch, list[Any]()

    def __call__(self, module: Any, name: str, result: Any = None) -> None:
        def called(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append([name, *map(said, arguments), *([said(keywords)] if keywords else [])])
            return result(*arguments, **keywords) if callable(result) else result

        self.patch.setattr(module, name, called)

    def clock(self, module: Any) -> None:
        """Let each look at the clock take a second."""
        ticks = itertools.count(100)
        self.patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


def said(value: Any) -> Any:
    """Return a value of JSON. Arguments of a buffer that are the defaults of make_spec are left out."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}, sum {float(value.double().sum()):.8g}"
    if isinstance(value, BufferSpec):
        return {"nodes": list(value.topology.nodes), **said(value.arguments())}
    if isinstance(value, Inputs):
        return [said(each) for each in (value.xs, value.topk_idx, value.topk_weights)]
    if callable(value):
        return value.__qualname__
    if isinstance(value, dict):
        usual = make_spec(1).arguments() if "num_experts" in value else {}
        return {name: said(each) for name, each in value.items() if name not in usual or each != usual[name]}
    if isinstance(value, (list, tuple)):
        return [said(each) for each in value]
    return plain(value)
