"""moe_rt: sync-free mixture-of-experts dispatch over symmetric memory."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rt.errors import MissingPackage

if find_spec("moe_rt._engine") is None:
    raise MissingPackage(
        f"got {Path(__file__).parent} without its compiled engine, expected an installed moe_rt; in a checkout run "
        "`make install` and then `.venv/bin/python`, or `pip install .` and leave the checkout's directory"
    )

if TYPE_CHECKING:
    from moe_rt.buffer.buffer import Buffer
    from moe_rt.buffer.handle import Handle
    from moe_rt.config.tuning import Tuning
    from moe_rt.group.rendezvous import ThreadGroup
    from moe_rt.nn.layer import MoEConfig, MoELayer

__all__ = ["Buffer", "Handle", "MoEConfig", "MoELayer", "ThreadGroup", "Tuning"]
__version__ = "0.1.0"
# These names are imported on first use: importing torch takes a second, and a process that starts ranks can do without.
_HOMES = {
    "Buffer": "buffer.buffer",
    "Handle": "buffer.handle",
    "MoEConfig": "nn.layer",
    "MoELayer": "nn.layer",
    "ThreadGroup": "group.rendezvous",
    "Tuning": "config.tuning",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
    part = find_spec(f"{__name__}.{name}")
    if part is not None and part.submodule_search_locations:  # `import moe_rt` is enough for moe_rt.nn.router.Router
        for home in _HOMES.values():
            import_module(f"{__name__}.{home}")
        return import_module(part.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
