"""Finds experts that DistributedDataParallel would average as replicas, in the autograd graph of combine's input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.compiler import is_compiling

from moe_rt.errors import InvalidConfig

_KNOWN: WeakSet[Any] = WeakSet()  # buffers whose experts were checked inside a wrapper


def refuse_replicated_experts(buffer: Any, y: Any) -> None:
    """Raise InvalidConfig if DistributedDataParallel averages parameters that `y` was computed with.

    These are experts, which differ between ranks. Only the first call inside a wrapper's forward checks.
    """
    if buffer.num_ranks == 1 or not isinstance(y, Tensor) or not y.requires_grad or is_compiling():
        return
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    wrapper = module and module.DistributedDataParallel._active_ddp_module
    if not wrapper or buffer in _KNOWN:
        return
    _KNOWN.add(buffer)
    replicated = {id(p) for p in wrapper._module_parameters}
    for p in leaves(y.grad_fn):
        if id(p) in replicated:
            raise InvalidConfig(
                f"DistributedDataParallel: got experts' weights {list(p.shape)} among its parameters, which it takes "
                "for copies of one another; expected moe_rt.parallel.own_experts(module, buffer), then prepare(model)"
            )


def leaves(node: Any, *ends: str) -> Iterator[Tensor]:
    """Yield the leaves of a node's graph, back to the dispatch that returned the rows, and to nodes of these names."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen or "dispatch" in node.name().lower() or node.name() in ends:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo.extend(before for before, _ in node.next_functions)
