"""Ends an unclosed buffer of this rank, and finds out how a peer ended the group."""

from __future__ import annotations

import sys
import threading

import torch.distributed as dist

from moe_rt.engine.engine import Engine
from moe_rt.errors import GroupPoisoned, MoeRtError, PeerDead
from moe_rt.memory.ucx import await_peers


def leave(engine: Engine) -> None:
    """Close a buffer that is garbage, or still open when the program ends. An exception that ends it ends the group."""
    here = threading.current_thread()
    ends = here is threading.main_thread() and not here.is_alive()  # true while exit handlers run
    error = getattr(sys, "last_value", None) if ends and not hasattr(sys, "ps1") else None
    if error is not None:  # not one shown at a prompt, where the program continued
        engine.poison(error)
    engine.close("its program ended" if ends else "its buffer became garbage")
    if ends:
        await_peers()


def first_failure(engine: Engine, error: BaseException) -> MoeRtError | None:
    """Return the error with which a peer ended the group, if `error` may only be its consequence.

    torch's collectives fail with such an error when a peer is dead, and cannot say what happened to it.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return None
    try:
        engine.health()
    except (GroupPoisoned, PeerDead) as first:
        return first
    except MoeRtError:
        pass
    return None
