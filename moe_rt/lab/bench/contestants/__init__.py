"""Contestants by name. `package.module:Class` names a user's Exchange, which is measured by the same rules."""

from __future__ import annotations

import importlib

from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench.contestants.base import Contestant

NAMES = {
    "moe_rt": "moe_rt.lab.bench.contestants.moe:MoeRt",
    "moe_rt_flat": "moe_rt.lab.bench.contestants.moe:Flat",
    "moe_rt_invariant": "moe_rt.lab.bench.contestants.moe:Invariant",
    "moe_rt_chunks": "moe_rt.lab.bench.contestants.moe:Chunked",
    "a2a": "moe_rt.lab.bench.contestants.permuted:AllToAll",
    "transformers": "moe_rt.lab.bench.contestants.transformers_ep:Transformers",
    "mpi": "moe_rt.lab.bench.contestants.permuted:Mpi",
    "memcpy": "moe_rt.lab.bench.contestants.memcpy:Memcpy",
}
ON_ONE_HOST = ("moe_rt", "a2a", "transformers", "mpi", "memcpy")
ON_NODES = ("moe_rt", "moe_rt_flat", "a2a", "mpi")


def find(name: str) -> type[Contestant]:
    """Return the class with this name. Its module is imported only now, since it may need packages that are missing."""
    module, _, attribute = NAMES.get(name, name).partition(":")
    if not attribute:
        raise InvalidConfig(f"contestants: got {name!r}, expected one of {', '.join(NAMES)} or package.module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"contestants: cannot import {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Contestant) and hasattr(found, "name")):
        expected = "expected a moe_rt.lab.bench.contestants.base.Contestant that has a name"
        raise InvalidConfig(f"contestants: got {name!r}, {expected}")
    return found
