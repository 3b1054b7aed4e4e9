"""Makes Inductor, torch's compiler, keep every op, in program order.

Peers wait for an op even if its outputs are unused. Inductor looks only at outputs: a rank without tokens has empty
ones, on which nothing seems to depend, so Inductor would drop the op or run it after its successor.

torch's registry of effects (`torch.library._register_effectful_op`) exists for this, but with it graphs that contain
activation checkpointing do not compile (torch 2.13: an assertion refuses the token that forward saves for backward).
All passes except the last one, the kernel scheduler, keep the order anyway; so only the scheduler gets dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch._ops import OpOverload

_kept: set[OpOverload] = set()
_latest: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # graph being lowered -> its last op so far


def kept_in_order(ops: Sequence[OpOverload], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fake`, the fake implementation of one of `ops`: it is called in tracing, before Inductor compiles."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        # Importing Inductor takes seconds, so it is not imported here; if Inductor compiles, it is loaded by now.
        if "torch._inductor.lowering" in sys.modules and not _kept.issuperset(ops):
            _keep_in_order(ops)
        return fake(*args, **kwargs)

    return traced


def _keep_in_order(ops: Sequence[OpOverload]) -> None:
    lowering: Any = sys.modules["torch._inductor.lowering"]
    for op in ops:  # first register the fallback that Inductor uses for unknown ops
        tag = lowering.get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
        lowering.lowerings[op] = _after_previous_op(lowering.lowerings[op])
    _kept.update(ops)


def _after_previous_op(lower: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.virtualized import V

    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        known = len(V.graph.operations)
        result = lower(*args, **kwargs)
        latest = _latest.get(V.graph)
        made: Any
        for made in V.graph.operations[known:]:  # the op and, if it has several outputs, each of them
            made.has_side_effects = lambda: True
            if latest is not None:
                V.graph.additional_buffer_deps[made.get_operation_name()].add(latest.get_name())
        _latest[V.graph] = V.graph.operations[-1]  # the last output is small, so keeping it until the next op is cheap
        return result

    return lower_in_order
