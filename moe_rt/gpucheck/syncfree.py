"""A layer's forward and backward never make the host wait, checked by torch's sync debug mode and its profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.gpucheck.layers import LayerSizes, make_layer
from moe_rt.gpucheck.profiles import RANGE, host_waits, kernels
from moe_rt.gpucheck.steps import Check
from moe_rt.nn.layer import MoELayer
from moe_rt.testing.rounds import WrongOutput

WARM_UP = 3


def check(check: Check) -> None:
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
