"""Makes Inductor, torch's own compiler, keep every op, and in the order in which the program calls them.

Peers wait for an op whatever becomes of its outputs. Inductor knows of outputs alone: those of a rank without tokens
are empty, so that nothing seems to depend on them, and it would drop the op, or run it behind the one that follows.

torch's registry of effects (`torch.library._register_effectful_op`) is made for that, but graphs that have activation
checkpointing in them do not compile then (torch 2.13: an assertion refuses the token that forward saves for backward).
The passes before the last one keep order anyway; so it is the last one, the scheduler of kernels, that is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch._ops import OpOverload

_kept: set[OpOverload] = set()
_latest: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of each graph that is being lowered, the last of these ops


def tells_inductor(ops: Sequence[OpOverload], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, the outputs of one of `ops` without their data, which whoever traces it asks for before it compiles."""

    def told(*args: Any, **kwargs: Any) -> Any:
        # To load Inductor takes seconds, and is not for those who trace without it; it is loaded when it traces.
        if "torch._inductor.lowering" in sys.modules and not _kept.issuperset(ops):
            _keep_in_order(ops)
        return fake(*args, **kwargs)

    return told


def _keep_in_order(ops: Sequence[OpOverload]) -> None:
    lowering: Any = sys.modules["torch._inductor.lowering"]
    for op in ops:  # at first as Inductor does it for every op that it does not know
        tag = lowering.get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
        lowering.lowerings[op] = _behind_the_latest(lowering.lowerings[op])
    _kept.update(ops)


def _behind_the_latest(lower: Callable[..., Any]) -> Callable[..., Any]:
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
        _latest[V.graph] = V.graph.operations[-1]  # the last output is a small one: it lives until the next op
        return result

    return lower_in_order
