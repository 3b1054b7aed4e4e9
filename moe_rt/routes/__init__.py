"""Routes recorded and replayed: training visits the experts that inference, or another number of ranks, has chosen."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor, nn

from moe_rt.group.groups import Group
from moe_rt.routes.file import UNRECORDED, Routes, load, merge
from moe_rt.routes.session import Recording, Replay

__all__ = ["UNRECORDED", "Recording", "Replay", "Routes", "load", "merge", "record", "replay"]


def record(model: nn.Module | Sequence[nn.Module], *, group: Group = None) -> Recording:
    """Record the experts of each token in each layer while a `with` block runs.

    Each forward of the model is one micro-batch; recomputations by activation checkpointing are not recorded again.
    The result may be entered again, which continues it. Padding is recorded as -1.

    Args:
        model: a model, or its layers: `MoELayer`s, or blocks of Transformers models (import
            `moe_rt.integrations.transformers` first). All have equal E and K.
        group: the ranks whose tokens make one batch; default: the ranks of the first layer. Identical on every rank.

    Returns:
        The recording; it can be replayed, or saved once the block has ended.

    Raises:
        InvalidConfig: the model has no such layer, or layers with different E or K.
    """
    return Recording(model, group)


def replay(
    routes: Routes | Recording | str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    *,
    tokens: Sequence[Tensor] | None = None,
    group: Group = None,
) -> Replay:
    """Make layers visit recorded experts while a `with` block runs. Collective over the group.

    Weights, their gradients and losses come from the live logits by the router's own rule, also for an expert that is
    no longer among the top K. Each forward of the model takes the next micro-batch. With as many ranks as recorded,
    each rank takes its own tokens; else a micro-batch's tokens, in the order of ranks, are divided into equal parts.

    Args:
        routes: recorded routes, or the path of their file. Either those of all ranks, identical on every rank, or on
            each rank its own: a recording, its `routes()`, or `Routes.of(rank=...)`. A rank's own need as many ranks as
            recorded.
        model, group: see `record`.
        tokens: for each micro-batch int64 [T], the number in the file of each of this rank's tokens, in place of the
            division above; -1 for a token without a record, which chooses its experts anew.

    Raises:
        InvalidConfig, ConfigMismatch: on every rank, if E, K or layers differ from the model's, tokens cannot be
            divided, or ranks have different routes.
        InvalidInput: on every rank, in a forward with another number of tokens or beyond the last micro-batch.
    """
    return Replay(routes, model, tokens=tokens, group=group)
