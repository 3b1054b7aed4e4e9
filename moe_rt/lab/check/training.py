"""Training on a GPU: a layer under autocast, steps of an optimiser, and layers whose experts are on virtual ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks
from moe_rt.lab.check.layers import TOLERANCE, LayerSizes, compare, dense_results, forward_backward, make_layer
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import WrongOutput

STEPS, QUICK_STEPS = 20, 2
LEARNING_RATE = 1e-3
VIRTUAL = 2  # ranks


def check(check: Check) -> None:
    columns = ["layer", "tensor", "difference", "allowed"]
    rows = check.begin("Training", columns, "of the largest value, against a dense loop or a layer of one rank")
    with check.part("autocast"):
        under_autocast(check.device, LayerSizes(), rows)
    with check.part("optimiser"):
        check.say(optimised(check.device, LayerSizes(), QUICK_STEPS if check.quick else STEPS))
    with check.part("virtual ranks"):
        on_virtual_ranks(check.device, LayerSizes(), rows, seconds=check.seconds / 2)
    check.say(f"{len(rows)} tensors agree")


def under_autocast(device: Any, sizes: LayerSizes, rows: list[list[Any]]) -> None:
    """Compare a bf16 layer under autocast with the dense loop."""
    layer, x = make_layer(device, torch.bfloat16, sizes)
    expected = dense_results(layer, x)
    with torch.autocast(x.device.type, torch.bfloat16):
        got = forward_backward(layer, layer, x)
    compare("under autocast", got, expected, TOLERANCE[torch.bfloat16], rows)
    layer.buffer.close()


def optimised(device: Any, sizes: LayerSizes, steps: int) -> str:
    """Fit a fixed target, and say how the loss fell.

    Raises:
        WrongOutput: the loss is not finite, or is not less than before.
    """
    layer, x = make_layer(device, torch.bfloat16, sizes)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LEARNING_RATE)
    target, losses = torch.sin(x.float()), []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        out, _ = layer(x)
        loss = (out.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    layer.buffer.check()
    layer.buffer.close()
    first, last = float(losses[0]), float(losses[-1])
    if not last < first:
        raise WrongOutput(f"AdamW: got a loss of {last:.4g} after {steps} steps, expected less than {first:.4g}")
    return f"loss {first:.4g} to {last:.4g} in {steps} steps"


def on_virtual_ranks(device: Any, sizes: LayerSizes, rows: list[list[Any]], *, seconds: float) -> None:
    """Compare a layer on several ranks, each with a part of the experts and of the tokens, with a layer of one rank."""
    layer, x = make_layer(device, torch.bfloat16, sizes)
    expected = forward_backward(layer, layer, x)
    whole = {name: value.detach() for name, value in layer.state_dict().items()}
    layer.buffer.close()

    def work(group: ThreadGroup) -> dict[str, Tensor]:
        tokens = x.tensor_split(VIRTUAL)[group.rank]
        part, _ = make_layer(device, torch.bfloat16, sizes, group)
        own = {name: value.shape for name, value in part.state_dict().items()}
        part.load_state_dict({name: _share(whole[name], shape, group.rank) for name, shape in own.items()})
        got = forward_backward(part, part, tokens)
        part.buffer.check()
        part.buffer.close()
        return got

    found = ThreadRanks(VIRTUAL, device).run(work, seconds=seconds)
    got = {
        name: sum(f[name].float() for f in found) if name == "router.weight" else torch.cat([f[name] for f in found])
        for name in expected
    }
    compare(f"on {VIRTUAL} virtual ranks", got, expected, TOLERANCE[torch.bfloat16], rows)


def _share(value: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """Return a rank's block of a parameter that is split over its first dimension, or all of a replicated one."""
    return value if value.shape == shape else value[rank * shape[0] : (rank + 1) * shape[0]]
