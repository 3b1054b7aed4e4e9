"""A one-rank layer on a GPU equals a dense loop over its experts, eager and compiled, and never makes the host wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import torch_device
from moe_rt.lab.check.measuring import RANGE, host_waits, kernels
from moe_rt.lab.check.steps import Check
from moe_rt.lab.testing.rounds import WrongOutput
from moe_rt.nn.layer import MoEConfig, MoELayer

# Largest difference relative to the largest value. bf16 has 8 bits, and products of two sums of rounded values.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
DTYPES = tuple(TOLERANCE)
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LayerSizes:
    hidden: int = 1024
    intermediate: int = 512
    experts: int = 32
    topk: int = 4
    tokens: int = 512


def check(check: Check, sizes: LayerSizes = LayerSizes()) -> None:
    columns = ["layer", "tensor", "difference", "allowed"]
    rows = check.begin("Layer", columns, "of the largest value; eager against a dense loop, compiled against eager")
    for dtype in DTYPES:
        layer, x = make_layer(check.device, dtype, sizes)
        eager: dict[str, Tensor] = {}
        with check.part(f"eager {dtype}"):
            eager = forward_backward(layer, layer, x)
            compare(f"eager {dtype}", eager, dense_results(layer, x), TOLERANCE[dtype], rows)
        with check.part(f"compiled {dtype}"):
            torch.compiler.reset()
            compiled = forward_backward(layer, torch.compile(layer, fullgraph=True), x)
            compare(f"compiled {dtype}", compiled, eager, TOLERANCE[dtype], rows)
        layer.buffer.close()
    with check.part("another default device"):
        for default in dict.fromkeys(("meta", "cpu", torch_device(check.device).type)):
            made_under(check.device, default, sizes, rows)
    with check.part("experts without tokens"):
        with_idle_experts(check.device, sizes, rows)
    check.say(f"{len(rows)} tensors agree")


def made_under(device: Any, default: str, sizes: LayerSizes, rows: list[list[Any]]) -> None:
    """A layer's parameters are on its group's device and its results are unchanged, whatever the default device."""
    layer, x = make_layer(device, torch.float32, sizes)
    expected = forward_backward(layer, layer, x)
    layer.buffer.close()
    with torch.device(default):
        layer, x = make_layer(device, torch.float32, sizes)
        got = forward_backward(layer, layer, x)
    compare(f"made under {default}", got, expected, TOLERANCE[torch.float32], rows)
    layer.buffer.close()


def with_idle_experts(device: Any, sizes: LayerSizes, rows: list[list[Any]]) -> None:
    """Route all tokens to the same few experts. The other experts' weights must have gradients, and these must be zero.

    Raises:
        WrongOutput: such a gradient is not zero.
    """
    layer, x = make_layer(device, torch.bfloat16, sizes)
    with torch.no_grad():
        x[:, 0] = 4.0
        layer.router.weight[:, 0] = -8.0
        layer.router.weight[: sizes.topk, 0] = 8.0
    got = forward_backward(layer, layer, x)
    compare("experts without tokens", got, dense_results(layer, x), TOLERANCE[torch.bfloat16], rows)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        idle = got[name][sizes.topk :]
        if not torch.equal(idle, torch.zeros_like(idle)):
            raise WrongOutput(f"experts without tokens, {name}: got a gradient that is not zero, expected zeros")
    layer.buffer.close()


def make_layer(
    device: Any, dtype: torch.dtype, sizes: LayerSizes, group: ThreadGroup | None = None
) -> tuple[MoELayer, Tensor]:
    """Return a seeded layer of a rank of the group, or of one rank, and an input."""
    where = torch_device(device)
    config = MoEConfig(
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        num_experts=sizes.experts,
        num_topk=sizes.topk,
        num_max_tokens_per_rank=sizes.tokens,
        dtype=dtype,
        timeout_s=TIMEOUT_S,
    )
    torch.manual_seed(5)
    layer = MoELayer(config, group or ThreadGroup.make(1, device)[0]).to(where)
    return layer, torch.randn(sizes.tokens, sizes.hidden, device="cpu").to(dtype).to(where)


def forward_backward(layer: MoELayer, call: Callable[[Tensor], Any], x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the layer when run through `call`."""
    x = x.clone().requires_grad_()
    return _results(layer, x, call(x)[0])


def dense_results(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients without the layer's code: every expert processes every token."""
    x = x.clone().requires_grad_()
    return _results(layer, x, _dense(layer, x))


def compare(
    name: str, got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, rows: list[list[Any]]
) -> None:
    """Add a row for each tensor that agrees.

    Raises:
        WrongOutput: a tensor does not agree.
    """
    for tensor, value in expected.items():
        difference = float((got[tensor].float() - value.float()).abs().max() / value.float().abs().max())
        if not difference <= tolerance:
            raise WrongOutput(f"{name}, {tensor}: got a difference of {difference:.3g}, expected at most {tolerance:g}")
        rows.append([name, tensor, float(f"{difference:.3g}"), tolerance])


def _results(layer: MoELayer, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    grad = torch.linspace(-1, 1, out.shape[1], device=out.device).to(out.dtype).expand_as(out)
    named = dict(layer.named_parameters())
    grads = torch.autograd.grad(out, [x, *named.values()], grad)
    return {"out": out.detach(), **dict(zip(["x", *named], grads, strict=True))}


def _dense(layer: MoELayer, x: Tensor) -> Tensor:
    """Compute the layer in fp32, rounding at the places where the layer rounds."""
    dtype, num_topk = layer.config.dtype, layer.config.num_topk

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).float()

    scores = F.linear(x.float(), layer.router.weight.float()).softmax(-1)
    top, idx = scores.topk(num_topk, dim=-1)
    weights = top / top.sum(-1, keepdim=True)
    rows, out = rounded(x), torch.zeros(x.shape, device=x.device)
    for expert in range(layer.config.num_experts):
        gate_up, down = (rounded(w[expert]) for w in (layer.experts.gate_up_proj, layer.experts.down_proj))
        gate, up = rounded(F.linear(rows, gate_up)).chunk(2, dim=-1)
        y = rounded(F.linear(rounded(F.silu(gate) * up), down))
        out = out + ((idx == expert) * weights).sum(-1, keepdim=True) * y
    return out.to(x.dtype)


WARM_UP = 3


def check_syncfree(check: Check) -> None:
    layer, x = make_layer(check.device, torch.bfloat16, LayerSizes())
    grad = torch.ones_like(x)
    for _ in range(WARM_UP):
        step(layer, x, grad)
    torch.cuda.synchronize()
    with check.part("torch.cuda.set_sync_debug_mode"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(layer, x, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check.say("no synchronising call of torch's")
    torch.cuda.synchronize()
    with check.part("profiler"):
        events = profiled(lambda: step(layer, x, grad))
        if waits := host_waits(events):
            raise WrongOutput(f"got {len(waits)} waits: {', '.join(sorted(set(waits)))}; expected none")
        check.say(f"no wait among {len(kernels(events))} kernels and copies")
    layer.buffer.check()
    layer.buffer.close()


def step(layer: MoELayer, x: Tensor, grad: Tensor) -> None:
    """Run forward and backward, with gradients for everything."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out, _ = layer(x)
    out.backward(grad)


def profiled(work: Any) -> Any:
    """Profile one call and return its events. The profiler and the device are quiet before and after the RANGE."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        with record_function(RANGE):
            work()
        torch.cuda.synchronize()
    return profiler.events()
