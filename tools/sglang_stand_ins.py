"""Stand-ins for modules that SGLang imports and CPU ranks do not run: its compiled kernels, Triton, and torchvision.

    import sglang_stand_ins  # before sglang

Their packages are built for CUDA: the first needs it, the second takes a gigabyte, the third fails to import. Text
models import names from them and decorate functions with them; every other use fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

# transformers checks what is installed and caches the result, so it must do so before the stand-ins exist.
from transformers.utils import is_torchvision_available

MISSING = ("sgl_kernel", "torchvision", "triton")


class _Named(type):
    """A class with any attributes, which are classes of the same kind. Functions that it decorates are unchanged."""

    def __getattr__(cls, name: str) -> _Named:
        return _named(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ == "get_current_target":  # SGLang asks Triton for its device, and takes an error as "CPU"
            raise RuntimeError("a stand-in for Triton has no device")
        return args[0] if args and isinstance(args[0], FunctionType) else cls


class _StandIn(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> _Named:
        return _named(name)


def _named(name: str) -> _Named:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


is_torchvision_available()
sys.meta_path.insert(0, _Finder())
