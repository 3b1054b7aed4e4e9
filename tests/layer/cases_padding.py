"""Functions that ranks run in the tests of padding: a layer with a mask, against one without the hidden tokens."""

from __future__ import annotations

from typing import Any

import torch
from layer.cases_kinds import filled_layer, layer_config, rows_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_rt import MoELayer
from moe_rt.errors import MoeRtError
from moe_rt.parallel import prepare

BATCH, LENGTH, HIDDEN = 3, 4, 16
# Real tokens of each rank: of some sequences, of none, and all.
MASKS = {
    "some": [[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]],
    "none": [[0] * LENGTH] * BATCH,
    "all": [[1] * LENGTH] * BATCH,
    "one": [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
}
# A batch counts as one sequence, so that a batch without its padding has the same losses.
LOSSES = dict(balance_scope="batch", aux_loss_coef=0.1, z_loss_coef=0.01)


class Biased(nn.Module):
    """A shared expert whose output is not zero for input of zero."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, device=device)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(-0.3, 0.4, p.numel()).reshape(p.shape))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *(p.to(x.dtype) for p in self.linear.parameters()))


def run(layer: MoELayer, x: Tensor, how: str, **padding: Any) -> dict[str, Any]:
    """Return outputs, losses, counts and all gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    forward: Any = DistributedDataParallel(prepare(layer)) if how == "ddp" else layer
    with torch.autocast(x.device.type, torch.bfloat16, enabled=how == "autocast"):
        if how == "checkpoint":
            out, aux = checkpoint(layer, x, use_reentrant=False, **padding)
        else:
            out, aux = forward(x, **padding)
    ((out * torch.linspace(-1, 1, HIDDEN, device=x.device)).sum() + aux.loss).backward()
    values = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    values |= {"load_balancing_loss": aux.load_balancing_loss, "z_loss": aux.z_loss, "mean_prob": aux.mean_prob}
    return values | {"load": aux.tokens_per_expert, "out": out.detach(), "x": x.grad, "topk_idx": aux.topk_idx}


def equals_without_padding(
    group: Any, masks: list[str], changes: dict[str, Any], how: str
) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]]:
    """Run with a mask, with an integer mask and ids of -1, and with ids only; padding is NaN or inf in x. Return the
    results of real tokens, the expected results without padding, and the results of padding.
    """
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    layer = filled_layer(layer_config(**LOSSES, num_max_tokens_per_rank=BATCH * LENGTH, **changes), group)
    if how == "shared":
        layer.shared_expert = Biased(layer.buffer.device)
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    device = layer.to(dtype).buffer.device
    mask = torch.tensor(MASKS[masks[rank]], dtype=torch.bool, device=device)
    x = rows_of(rank, BATCH * LENGTH, HIDDEN).reshape(BATCH, LENGTH, HIDDEN).to(dtype).to(device)
    x[~mask] = torch.tensor([torch.nan, torch.inf] * (HIDDEN // 2), device=device, dtype=dtype)
    expected = run(layer, x[mask], how)
    ids = torch.full((BATCH * LENGTH, layer.config.num_topk), -1, device=device)
    ids[mask.flatten()] = expected["topk_idx"]
    replayed = run(layer, x[mask], how, topk_idx=expected["topk_idx"])
    pairs = []
    for padding, wanted in (
        ({"mask": mask}, expected),
        ({"mask": mask.long(), "topk_idx": ids}, replayed),
        ({"topk_idx": ids}, replayed),
    ):
        got = run(layer, x, how, **padding)
        hidden = {name: got[name][~mask] for name in ("out", "x")}
        got |= {name: got[name][mask] for name in ("out", "x")}
        got["topk_idx"] = got["topk_idx"][mask.flatten()]
        pairs.append((got, wanted, hidden))
    forwards = 10 if how == "checkpoint" else 5
    assert layer.metrics.snapshot().tokens_per_expert == (forwards * expected["load"]).tolist()
    layer.buffer.close()
    return pairs


BAD_MASKS = {
    "float": lambda mask: mask.float(),
    "complex": lambda mask: mask.to(torch.complex64),
    "too short": lambda mask: mask[:1],
    "flat": lambda mask: mask.flatten(),
    "4-D": lambda mask: mask[:, None, None],
    "elsewhere": lambda mask: mask.to("meta"),
    "list": lambda mask: mask.tolist(),
    "float ids": lambda mask: {"topk_idx": torch.zeros(BATCH * LENGTH, 3, device=mask.device)},
    "ids elsewhere": lambda mask: {"topk_idx": torch.zeros(BATCH * LENGTH, 3, dtype=torch.int64, device="meta")},
    "listed ids": lambda mask: {"topk_idx": [[0, 1, 2]] * BATCH * LENGTH},
}


def refused(group: Any, kinds: list[str]) -> list[MoeRtError | None]:
    """Return this rank's error for each bad mask of rank 0; unless errors end the group, good calls follow each."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    layer = filled_layer(layer_config(timeout_s=30.0), group)
    device = layer.buffer.device
    x = rows_of(rank, BATCH * LENGTH, HIDDEN).reshape(BATCH, LENGTH, HIDDEN).to(device)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=device)
    errors: list[MoeRtError | None] = []
    for kind in kinds:
        bad = BAD_MASKS[kind](mask) if rank == 0 else mask
        try:
            layer(x, **(bad if isinstance(bad, dict) else {"mask": bad}))
            errors.append(None)
        except MoeRtError as error:
            errors.append(error)
        if layer.buffer.heap != "loopback":  # a refusal ends the group on loopback, as on CUDA
            layer(x, mask=mask)
    layer.buffer.close()
    return errors
