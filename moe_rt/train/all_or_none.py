"""Work of the ranks between steps: every rank gets every rank's result, or all raise the error of the rank that
failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moe_rt.errors import MoeRtError
from moe_rt.group import all_or_none as ranks
from moe_rt.group.rendezvous import StoreRendezvous


def all_or_none(work: Callable[[], Any], refusal: type[MoeRtError], what: str) -> list[Any]:
    """Return every rank's result of `work`, a value for JSON. Collective over the world; the wait ends if a rank dies.

    Raises:
        refusal: the system refused a rank's request (an OSError); raised on all ranks.
        InvalidConfig: `work` raised another error; names the rank, and `what` it could not do.
        PeerDead, StoreLost: a rank will never arrive.
    """
    rendezvous = StoreRendezvous(dist.distributed_c10d._get_default_group())

    def attempt() -> dict[str, Any]:
        try:
            return {"result": work()}
        except OSError as error:
            raise refusal(f"rank {rendezvous.rank} got {in_words(error)}", rank=rendezvous.rank) from None

    return [record["result"] for record in ranks.all_or_none(rendezvous, attempt, what, math.inf)]


def in_words(error: BaseException) -> str:
    """Describe an error: the system's message and its file, if it names one; of any other error the class and text."""
    if not isinstance(error, OSError) or error.strerror is None:
        return f"{type(error).__name__}: {error}"
    return f'"{error.strerror}"' + (f" for {error.filename}" if error.filename else "")
