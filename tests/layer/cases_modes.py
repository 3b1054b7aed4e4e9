"""A layer under forward mode, anomaly mode and torch.vmap, and arguments that it refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.parallel import prepare

TOKENS, HIDDEN = 6, 8
SIZES = dict(hidden=HIDDEN, intermediate=16, num_experts=4, num_topk=2, num_max_tokens_per_rank=TOKENS)


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else group.rank()


def input_of(group: Any) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank_of(group))).double()


def tangents_agree(group: Any, options: dict[str, Any]) -> None:
    """Check the tangents of output and losses against finite differences."""
    torch.manual_seed(0)
    config = MoEConfig(**SIZES, aux_loss_coef=0.1, z_loss_coef=0.1, **options)
    layer = MoELayer(config, group).double()
    prepare(layer)
    x = input_of(group)
    chosen = layer(x)[1].topk_idx

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = layer(x, topk_idx=chosen)
        return out, aux.loss

    direction = torch.randn_like(x)
    _, tangents = torch.func.jvp(run, (x,), (direction,))
    ahead, behind = run(x + 1e-6 * direction), run(x - 1e-6 * direction)
    for tangent, a, b in zip(tangents, ahead, behind, strict=True):
        torch.testing.assert_close(tangent, (a - b) / 2e-6, rtol=1e-6, atol=1e-8)


ODD: dict[str, Any] = {
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "None": lambda t: None,
    "str": lambda t: "tokens",
    "int": lambda t: 3,
    "bool": lambda t: t > 0,
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "complex": lambda t: t.to(torch.complex64),
}


def odd_argument(group: Any, faulty_rank: int, name: str, argument: str) -> str:
    """The faulty rank passes an unusual argument. Return this rank's error; the group stays usable."""
    layer, x = MoELayer(MoEConfig(**SIZES), group), input_of(group).float()
    with layer.buffer:
        given: dict[str, Any] = {"x": x, "topk_idx": layer(x)[1].topk_idx}
        if rank_of(group) == faulty_rank:
            given[argument] = ODD[name](given[argument])
        text = "no error"
        try:
            layer(**given)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        layer(x)
        return text


def many_at_once(group: Any) -> list[str]:
    """Return the errors of torch.vmap of the layer, over tokens and over weights."""
    layer, x, texts = MoELayer(MoEConfig(**SIZES), group), input_of(group).float(), []
    stacked = {name: torch.stack([p.detach()] * 2) for name, p in layer.named_parameters()}
    with layer.buffer:
        for call in (
            lambda: torch.vmap(lambda x: layer(x)[0])(torch.stack([x, x])),
            lambda: torch.vmap(lambda p: torch.func.functional_call(layer, p, (x,))[0])(stacked),
        ):
            try:
                call()
            except RuntimeError as error:
                texts.append(f"{type(error).__name__}: {error}")
        layer(x)
    return texts


def refused_routing(group: Any, faulty_rank: int) -> str:
    from moe_rt.errors import InvalidRouting

    with Buffer(group, **MoEConfig(**SIZES).buffer_sizes()) as buffer:
        x = input_of(group).float()
        text = "no error"
        try:
            if buffer.rank == faulty_rank:
                buffer.refuse(InvalidRouting("a router of one's own: got 9, expected less"))
            buffer.dispatch(x, torch.zeros(TOKENS, 2, dtype=torch.int64), torch.ones(TOKENS, 2))
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        buffer.combine(*buffer.dispatch(x, torch.zeros(TOKENS, 2, dtype=torch.int64), torch.ones(TOKENS, 2)))
        return text
