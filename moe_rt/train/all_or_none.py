"""What ranks tell each other between steps: a value of each of them, or what the system refused one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_rt.errors import MoeRtError


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank; each travels as JSON. Collective over the world."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, F.pad(mine, (0, longest - mine.numel())))
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]


def all_or_none(work: Callable[[], Any], refusal: type[MoeRtError]) -> list[Any]:
    """Every rank's result of `work`, a value for JSON. Collective over the world.

    Raises:
        refusal: the system refused a rank what it asked for (an OSError); on every rank alike.
    """
    try:
        outcome = {"result": work()}
    except OSError as error:
        outcome = {"error": in_words(error)}
    outcomes = gather(outcome)
    for rank, other in enumerate(outcomes):
        if "error" in other:
            raise refusal(f"rank {rank} got {other['error']}", rank=dist.get_rank(), peer=rank)
    return [other["result"] for other in outcomes]


def in_words(error: BaseException) -> str:
    """What the system said, and of which file where it names one; of another error its kind and text."""
    if not isinstance(error, OSError) or error.strerror is None:
        return f"{type(error).__name__}: {error}"
    return f'"{error.strerror}"' + (f" for {error.filename}" if error.filename else "")
