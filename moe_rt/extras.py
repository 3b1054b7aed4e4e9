"""Packages that only some uses need: whoever needs one says so before any work is done, and how to install it."""

from __future__ import annotations

import importlib.util

import torch

from moe_rt.errors import MissingPackage


def how_to_install(extra: str) -> str:
    """The command that adds an extra; no package index has moe_rt, so it names the checkout or the wheel."""
    return f"pip install '.[{extra}]' in moe_rt's checkout, or 'WHEEL[{extra}]' with the path of its wheel"


def cuda_extra() -> str:
    """The extra whose compiler and NVSHMEM are of the same CUDA as torch's build."""
    return "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda"


def require(package: str, extra: str, what: str) -> None:
    """Raises MissingPackage if `package` of the extra `extra` is not installed; `what` needs it."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(f"{what}: got no package {package}, expected one; {how_to_install(extra)}")
