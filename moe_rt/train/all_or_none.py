"""Work that ranks do between steps: every rank has every rank's result, or all raise what the system refused one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moe_rt.errors import MoeRtError
from moe_rt.heap import segments
from moe_rt.heap.rendezvous import StoreRendezvous


def all_or_none(work: Callable[[], Any], refusal: type[MoeRtError], what: str) -> list[Any]:
    """Every rank's result of `work`, a value for JSON. Collective over the world; a rank that dies is no endless wait.

    Raises:
        refusal: the system refused a rank what it asked for (an OSError); on every rank alike.
        InvalidConfig: `work` raised anything else; says on which rank, and that it could not do `what`.
        PeerDead, StoreLost: a rank will never come.
    """
    rendezvous = StoreRendezvous(dist.distributed_c10d._get_default_group())

    def attempt() -> dict[str, Any]:
        try:
            return {"result": work()}
        except OSError as error:
            raise refusal(f"rank {rendezvous.rank} got {in_words(error)}", rank=rendezvous.rank) from None

    return [record["result"] for record in segments.all_or_none(rendezvous, attempt, what, math.inf)]


def in_words(error: BaseException) -> str:
    """What the system said, and of which file where it names one; of another error its kind and text."""
    if not isinstance(error, OSError) or error.strerror is None:
        return f"{type(error).__name__}: {error}"
    return f'"{error.strerror}"' + (f" for {error.filename}" if error.filename else "")
