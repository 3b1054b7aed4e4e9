"""Functions that ranks run in the tests of dtypes: layers that are cast or run under autocast, and refused input."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from layer.cases_layer import HIDDEN, config, inputs_for, seeded_layer
from torch import Tensor

from moe_rt import MoELayer
from moe_rt.errors import MoeRtError

CASTS = ("bf16", "half", "double", "autocast", "autocast half", "default")
DTYPES = dict(zip(CASTS, (torch.bfloat16, torch.float16, torch.float64, torch.bfloat16, torch.float16), strict=False))


def step(layer: MoELayer, x: Tensor, device: str = "cpu") -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out, _ = layer(x)
    (out * torch.linspace(-1, 1, HIDDEN, device=x.device).to(out.dtype)).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


def follows(group: Any, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor], torch.dtype, torch.dtype]:
    """Return the results of a layer that follows its input and of one with a fixed dtype; rows' and experts' dtypes."""
    results, layers = [], []
    dtype = DTYPES.get(how, torch.float32)
    for told in (None, dtype):
        layer = seeded_layer(config(dtype=told), group)
        x = inputs_for(0, 6).to(layer.buffer.device)
        if how in ("bf16", "half", "double"):
            layer, x = layer.to(dtype), x.to(dtype)
        with torch.autocast(x.device.type, dtype, enabled=how.startswith("autocast")):
            results.append(step(layer, x))
        layers.append(layer)
    seen: list[torch.dtype] = []
    hook = layers[0].experts.register_forward_hook(lambda module, args, y: seen.extend((args[0].dtype, y.dtype)))
    with torch.autocast(x.device.type, dtype, enabled=how.startswith("autocast")):
        layers[0](x)
    hook.remove()
    assert seen[0] is seen[1]
    for layer in layers:
        layer.buffer.close()
    return results[0], results[1], layers[0].buffer.spec.dtype, seen[0]


def alternates(group: Any) -> list[torch.dtype]:
    """Evaluation under autocast between steps, and between a forward and its backward, changes no bit of training."""
    layer = seeded_layer(config(), group)
    x = inputs_for(0, 6).to(layer.buffer.device)

    def evaluate() -> torch.dtype:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
            layer(x)
        return layer.buffer.spec.dtype

    dtypes = [evaluate()]  # evaluate first
    first = step(layer, x)
    dtypes.append(layer.buffer.spec.dtype)
    buffers = [layer.buffer]
    dtypes.append(evaluate())
    inside = x.clone().requires_grad_()
    out, _ = layer(inside)
    evaluate()
    (out * torch.linspace(-1, 1, HIDDEN, device=x.device)).sum().backward()
    torch.testing.assert_close(inside.grad, first["x"], rtol=0, atol=0)
    torch.testing.assert_close(step(layer, x), first, rtol=0, atol=0)
    assert layer.buffer is buffers[0], "the same buffer again"
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(step(copied, x), first, rtol=0, atol=0)
    layer.metrics.snapshot()
    return dtypes


def compiled(group: Any) -> list[float]:
    """Return the differences between eager and compiled; the compiled layer is the first to need either dtype."""
    plain, layer = (seeded_layer(config(), group) for _ in range(2))
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    differences = []
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        x = inputs_for(0, 6)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            got, expected = graph(x)[0], plain(x)[0]
        got.sum().backward()
        differences.append(float((got - expected).abs().max()))
    return differences


def unused_is_let_go(group: Any) -> tuple[bool, torch.dtype]:
    """A layer that is cast before its first forward keeps no buffer of the old dtype."""
    layer = seeded_layer(config(num_max_tokens_per_rank=9), group)
    first = layer.buffer
    layer.to(torch.bfloat16)(inputs_for(0, 3).bfloat16())
    closed = first._finalizer
    del first
    return not closed.alive, layer.buffer.spec.dtype


def warned(group: Any, fixed: torch.dtype, how: str) -> list[str]:
    """Return the warnings of two forwards of a layer with a fixed dtype."""
    layer = seeded_layer(config(dtype=fixed), group)
    if how == "bf16":
        layer.to(torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                layer(inputs_for(0, 3))
    layer.buffer.close()
    return [str(w.message) for w in caught if "MoELayer" in str(w.message)]


def refused(group: Any, what: str) -> MoeRtError:
    """Rank 0 passes input that a layer refuses. All ranks raise in the same forward, and the next one works."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    layer = seeded_layer(config(timeout_s=30.0), group)
    x = inputs_for(rank, 4).to(layer.buffer.device)
    good, idx = x, None
    if rank == 0:
        x = {
            "int": x.long(),
            "bool": x > 0,
            "complex": x.to(torch.complex64),
            "width": x[:, :8],
            "scalar": x.sum(),
            "twice as wide": x.repeat(1, 2),
            "topk_idx": x,
        }[what]
        idx = torch.zeros(4, 2, dtype=torch.int64, device=x.device) if what == "topk_idx" else None
    try:
        layer(x, idx)
    except MoeRtError as error:
        if layer.buffer.heap != "loopback":  # a refusal ends the group on loopback, as on CUDA
            layer(good)
        return error
    finally:
        layer.buffer.close()
    raise AssertionError(f"rank {rank} raised no error")
