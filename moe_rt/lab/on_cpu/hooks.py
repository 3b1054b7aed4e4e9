"""Hooks into Python's imports: torch is changed after its import, deep_ep is found here, triton gets a stand-in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

SWITCH, DEVICES = "MOE_RT_ON_CPU", "MOE_RT_ON_CPU_DEVICES"
DEFAULT_DEVICES = 8
SITE = str(Path(__file__).parent / "site")
_DEEP_EP = "moe_rt.compat."


class NotOnCpu(RuntimeError):
    """A program reached something of CUDA that has no equivalent on CPU ranks."""


def num_devices() -> int:
    """Return the number of CUDA devices that torch reports."""
    return int(os.environ.get(DEVICES, DEFAULT_DEVICES))


def environment(devices: int) -> dict[str, str]:
    """Return the variables that activate on-cpu in a Python process and all its children."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", SITE)]
    return {
        SWITCH: "1",
        DEVICES: str(devices),
        "PYTHONPATH": os.pathsep.join([SITE, *paths]),
        "CUDA_VISIBLE_DEVICES": "",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def activate() -> None:
    """Make this process, and all Python processes that it starts, see CPU ranks as CUDA devices. Idempotent.

    It is best called before torch is imported: objects that a module took from torch before keep their meaning.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    os.environ.update(environment(num_devices()))
    sys.meta_path.insert(0, _Finder())
    if "torch" in sys.modules:
        _change_torch(sys.modules["torch"])
    if "triton" in sys.modules:
        _refuse_launches(sys.modules["triton"])


def which_deep_ep() -> str:
    """Describe what `import deep_ep` finds, without an import of it."""
    spec = _found_elsewhere("deep_ep", None)
    if spec is not None:
        return f"the installed deep_ep in {spec.origin}, which needs a GPU; uninstall it to use moe_rt.compat.deep_ep"
    return "moe_rt.compat.deep_ep"


class _Finder(MetaPathFinder):
    """Answers for torch, deep_ep and triton only."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if name == "torch":
            return _then(_found_elsewhere(name, path), _change_torch)
        if top == "deep_ep":
            return _found_elsewhere(name, path) or _alias(name)
        if top == "triton":
            found = _found_elsewhere(name, path)
            if found is not None:
                return _then(found, _refuse_launches) if name == "triton" else found
            return None if _asked_by_torch() else ModuleSpec(name, _StandIn(), is_package=True)
        return None


def _found_elsewhere(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder) and (spec := finder.find_spec(name, path)) is not None:
            return spec
    return None


def _asked_by_torch() -> bool:
    """True if the import that runs now is one of torch's, which would compile with triton."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") or "").startswith((__name__, "importlib")):
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] == "torch"


class _Then(Loader):
    """Calls a function with a module after it was loaded."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], None]) -> None:
        self._loader, self._after = loader, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _then(spec: ModuleSpec | None, after: Callable[[ModuleType], None]) -> ModuleSpec | None:
    if spec is not None and spec.loader is not None:
        spec.loader = _Then(spec.loader, after)
    return spec


class _Alias(Loader):
    """Gives a module of moe_rt.compat under another name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_DEEP_EP + spec.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import has replaced it


def _alias(name: str) -> ModuleSpec | None:
    if find_spec(_DEEP_EP + name) is None:
        return None
    return ModuleSpec(name, _Alias(), is_package=True)


class _StandIn(Loader):
    """Makes stand-ins for triton's modules."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from moe_rt.lab.on_cpu.triton import fill

        if module.__name__ == "triton" and "torch" in sys.modules:
            sys.modules["triton"] = None  # type: ignore[assignment]  # torch's compiler must not find the stand-in
            try:
                import_module("torch._inductor.runtime.triton_compat")
            finally:
                sys.modules["triton"] = module
        fill(module)


def _change_torch(torch: ModuleType) -> None:
    from moe_rt.lab.on_cpu.torch import change

    change()


def _refuse_launches(triton: ModuleType) -> None:
    from moe_rt.lab.on_cpu.triton import refuse_launches

    refuse_launches()
