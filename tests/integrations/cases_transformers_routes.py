"""Functions that ranks run in the tests of routes of Transformers models."""

from __future__ import annotations

from typing import Any

import torch
from integrations.cases_transformers import load
from integrations.transformers_models import VOCABULARY
from torch import Tensor, nn

from moe_rt import routes
from moe_rt.errors import InvalidInput


def tokens(rank: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(rank))


def step(model: Any, rank: int) -> list[Tensor]:
    """Return the loss and all gradients of one step."""
    model.zero_grad()
    logits = model(tokens(rank), use_cache=False).logits
    loss = (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def reroute(model: nn.Module) -> None:
    """Change the routers so that they choose other experts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                p.copy_(torch.randn(p.shape, generator=generator))


def replayed_by_ranks(group: Any, model_path: str, path: str) -> tuple[Tensor, Tensor, str]:
    """Return this rank's logits, the experts that it visited, and the error of a batch that only rank 1 has wrong."""
    model: Any = load(model_path, fsdp_size=2, ep_size=2)
    rank = torch.distributed.get_rank()
    with torch.no_grad(), routes.replay(path, model), routes.record(model) as again:
        logits = model(tokens(rank), use_cache=False).logits
    ids, said = again.routes().topk_idx, ""
    try:
        with torch.no_grad(), routes.replay(path, model):
            model(tokens(rank)[: 2 - rank], use_cache=False)
    except InvalidInput as error:
        said = type(error).__name__
    return logits, ids, said
