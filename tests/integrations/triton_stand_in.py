"""Triton's names, for packages that define kernels for GPUs when they are imported: none of them can run here.

Importing this puts it in place, unless Triton is there.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch._functorch.aot_autograd  # before Triton seems to be there: torch would want all of it
import torch._inductor.compile_fx
import torch.utils._triton


class _Names(ModuleType):
    """Decorators give back the kernel; types are no types."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("jit", "autotune", "heuristics"):
            return lambda *args, **_: args[0] if args and callable(args[0]) else lambda kernel: kernel
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


if importlib.util.find_spec("triton") is None:
    assert not torch.utils._triton.has_triton_package()  # which torch remembers
    sys.modules["triton"], sys.modules["triton.language"] = triton, language = _Names("triton"), _Names("language")
    triton.language, triton.__version__ = language, "3.3.0"
