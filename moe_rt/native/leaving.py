"""How a rank leaves a group without having closed its buffer, and what its peers are told of it."""

from __future__ import annotations

import sys
import threading

import torch.distributed as dist

from moe_rt.errors import GroupPoisoned, MoeRtError, PeerDead
from moe_rt.heap.ucx import await_peers
from moe_rt.native.engine import Engine


def leave(engine: Engine) -> None:
    """For a buffer that is garbage, or open when the program ends. An exception that ends it ends the group, too."""
    here = threading.current_thread()
    ends = here is threading.main_thread() and not here.is_alive()  # so it is while exit handlers run
    error = getattr(sys, "last_value", None) if ends and not hasattr(sys, "ps1") else None
    if error is not None:  # and it is none that somebody saw at a prompt and went on from
        engine.poison(error)
    engine.close("its program ended" if ends else "its buffer became garbage")
    if ends:
        await_peers()


def first_failure(engine: Engine, error: BaseException) -> MoeRtError | None:
    """What a peer has ended the group with, where `error` may only be what came of it.

    Collectives of torch fail with such an error when a peer is gone, and cannot say what happened to it.
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
