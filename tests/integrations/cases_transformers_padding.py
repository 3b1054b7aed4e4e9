"""Functions that ranks run in the tests of padding in Transformers models: results of real tokens, and tokens sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from integrations.cases_transformers import configured, load, objective, tokens_of, whole
from integrations.cases_transformers_experts import relative
from torch import Tensor

from moe_rt import Buffer

SHAPE = (4, 6)


def padded_tokens(batch: int, side: str) -> tuple[Tensor, Tensor]:
    """Return tokens and their attention mask; sequence i has i tokens of padding."""
    mask = torch.arange(SHAPE[1]) >= torch.arange(SHAPE[0])[:, None]
    mask = (mask if side == "left" else mask.fliplr()).long()
    return tokens_of(batch, SHAPE) * mask, mask


def loss_of(model: Any, batch: int, side: str) -> tuple[Tensor, Tensor]:
    """Return the loss and logits of real tokens; the loss includes the family's load-balancing loss if it has one."""
    tokens, mask = padded_tokens(batch, side)
    balances = {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    out = model(tokens, attention_mask=mask, use_cache=False, **balances)
    logits = out.logits[mask == 1]
    return objective(logits) + (out.aux_loss if balances else 0), logits.detach()


def equals_one_process(
    group: Any, path: str, distributed: dict[str, int], attention: str, checkpointing: bool, send_padding: bool
) -> dict[str, Any]:
    """Compare logits of real tokens, every gradient and greedy tokens; count the tokens that each dispatch sent."""
    model, reference = load(path, **distributed), load(path)
    for m in (model, reference):
        m.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    num_batches = distributed.get("fsdp_size", 1)
    mine = dist.get_rank(group) * num_batches // dist.get_world_size(group)
    sent: list[int] = []
    dispatch = Buffer.dispatch

    def counting(self: Buffer, x: Tensor, idx: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(int((idx != -1).any(1).sum()))
        return dispatch(self, x, idx, *args, **kwargs)

    # Run two forwards before a backward: recomputation must use each forward's own padding.
    sides = ("left", "right")
    with mock.patch.object(Buffer, "dispatch", counting), configured(send_padding=send_padding):
        losses, logits = zip(*(loss_of(model, mine, side) for side in sides), strict=True)
        sum(losses).backward()
    different = []
    for batch in range(num_batches):
        for side, got in zip(sides, logits, strict=True):
            loss, expected = loss_of(reference, batch, side)
            (loss / num_batches).backward()
            if batch == mine:
                different.append(relative(got, expected))
    expected_grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    grads = {n: relative(whole(p.grad), expected_grads[n]) for n, p in model.named_parameters() if n in expected_grads}
    prompt, mask = padded_tokens(mine, "left")
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    same = torch.equal(model.generate(prompt, **options), reference.generate(prompt, **options))
    return {"logits": max(different), "grads": max(grads.values()), "same_tokens": same, "sent": sent}
