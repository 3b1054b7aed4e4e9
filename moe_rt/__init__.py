"""moe_rt: sync-free mixture-of-experts dispatch over symmetric memory."""

from importlib.util import find_spec
from pathlib import Path

from moe_rt.errors import MissingPackage

if find_spec("moe_rt._engine") is None:
    raise MissingPackage(
        f"got {Path(__file__).parent} without its compiled engine, expected an installed moe_rt; in a checkout run "
        "`make install` and then `.venv/bin/python`, or `pip install .` and leave the checkout's directory"
    )

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.handle import Handle
from moe_rt.heap.rendezvous import ThreadGroup
from moe_rt.nn.layer import MoEConfig, MoELayer

__all__ = ["Buffer", "Handle", "MoEConfig", "MoELayer", "ThreadGroup"]
__version__ = "0.1.0"
