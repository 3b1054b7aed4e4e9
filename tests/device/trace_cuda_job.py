"""Prints every aten op of a MoE layer's forward and backward over fake CUDA tensors, one a line.

It runs in a dedicated process, since the guard it loads stays.

    python trace_cuda_job.py GUARD_LIBRARY [syncing]

With `syncing` the layer's router reads a count on the host, as a layer that synchronises would.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.emulated_gpu import EmulatedGpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt import MoEConfig, MoELayer, ThreadGroup


class Printed(TorchDispatchMode):
    """Prints ops; a copy between devices is printed with both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = [t.device.type for t in (*args, out) if isinstance(t, Tensor)]
        print(func, *dict.fromkeys(devices))
        return out


def walk_backward(out: Tensor, grad: Tensor) -> None:
    """Run backward node by node: the autograd engine refuses CUDA in a torch without it."""
    waiting: dict[Any, int] = {}
    stack, seen = [out.grad_fn], {out.grad_fn}
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            waiting[node] = waiting.get(node, 0) + 1
            if node not in seen:
                seen.add(node)
                stack.append(node)
    grads: dict[Any, dict[int, Tensor]] = {out.grad_fn: {out.output_nr: grad}}
    ready = [out.grad_fn]
    while ready:
        node = ready.pop()
        given = grads.pop(node, {})
        results: Any = (None,) * len(node.next_functions)
        if given and not hasattr(node, "variable"):
            call = node if callable(node) else node.apply  # C++ nodes are callable, Python nodes have apply
            results = call(*(given.get(i) for i in range(max(given) + 1)))
            results = results if isinstance(results, tuple) else (results,)
            results = results[: len(node.next_functions)]  # Python nodes also give gradients of plain arguments
        for (child, index), g in zip(node.next_functions, results, strict=True):
            if child is None:
                continue
            if g is not None:
                held = grads.setdefault(child, {})
                held[index] = held[index] + g if index in held else g
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)


def main() -> None:
    ctypes.CDLL(sys.argv[1])
    config = MoEConfig(
        hidden=64, intermediate=32, num_experts=8, num_topk=2, num_max_tokens_per_rank=16, dtype=torch.bfloat16
    )
    layer = MoELayer(config, ThreadGroup.make(1, EmulatedGpu())[0])
    layer.buffer._engine.device = torch.device("cuda", 0)
    if "syncing" in sys.argv:
        layer.router.register_forward_hook(lambda module, inputs, outputs: outputs[0].max().item())
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {n: torch.empty_like(p, device="cuda").requires_grad_() for n, p in layer.named_parameters()}
        x = torch.empty(16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with Printed():
            out, aux = torch.func.functional_call(layer, params, (x,))
            loss = out.float().sum() + aux.loss
            walk_backward(loss, torch.ones_like(loss))


if __name__ == "__main__":
    main()
