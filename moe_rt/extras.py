"""Optional packages: code that needs one checks for it before any work is done and says how to install it."""

from __future__ import annotations

import importlib.util

import torch

from moe_rt.errors import MissingPackage


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra. It names the checkout or the wheel: no package index has moe_rt."""
    return f"pip install '.[{extra}]' in moe_rt's checkout, or 'WHEEL[{extra}]' with the path of its wheel"


def cuda_extra() -> str:
    """Return the extra whose compiler and NVSHMEM match the CUDA version of torch's build."""
    return "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda"


def require(package: str, extra: str, what: str) -> None:
    """Raise MissingPackage if `package`, which `what` needs and the extra `extra` installs, is missing."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(f"{what}: got no package {package}, expected one; {how_to_install(extra)}")
