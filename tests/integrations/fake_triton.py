"""Stand-in for Triton, for packages that define GPU kernels when they are imported: none of them can run here.

Importing this module installs it unless Triton is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch._functorch.aot_autograd  # import these first: with Triton present, torch would require all of it
import torch._inductor.compile_fx
import torch.utils._triton


class _Names(ModuleType):
    """Decorators return the kernel unchanged; types are empty classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("jit", "autotune", "heuristics"):
            return lambda *args, **_: args[0] if args and callable(args[0]) else lambda kernel: kernel
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


if importlib.util.find_spec("triton") is None:
    assert not torch.utils._triton.has_triton_package()  # torch caches the answer
    sys.modules["triton"], sys.modules["triton.language"] = triton, language = _Names("triton"), _Names("language")
    triton.language, triton.__version__ = language, "3.3.0"
