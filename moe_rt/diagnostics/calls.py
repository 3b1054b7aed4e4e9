"""Finds the op that ranks disagree about: a rank numbers its ops, and a number must be the same call on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moe_rt.diagnostics.report import Disagreement, OpRecord, RankReport, name_ranks

MOST_CALLS = 4


def disagreement(ranks: Sequence[RankReport]) -> Disagreement | None:
    """Return the first op that ranks called differently; None if they agree on all ops that they have reached."""
    calls: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for op in rank.last_ops:
            # A rank that refuses an op may not know the handle it was given.
            if op.handle_seq or op.op == "dispatch":
                calls[op.number][_call(op)].append(rank.rank)
    for _, callers in sorted(calls.items()):
        if len(callers) > 1:
            shown = [f"{name_ranks(who)} called {call}" for call, who in callers.items()]
            more = [f"and {len(shown) - MOST_CALLS} more calls"] if len(shown) > MOST_CALLS else []
            return Disagreement("; ".join(shown[:MOST_CALLS] + more), _outvoted(list(callers.values())))
    return None


def _call(op: OpRecord) -> str:
    handle = f" (handle of dispatch #{op.handle_seq})" if op.handle_seq else ""
    return f"{op} of layer tag {op.tag}{handle}"


def _outvoted(camps: list[list[int]]) -> list[int]:
    largest = max(camps, key=len)
    others = sorted(rank for camp in camps if camp is not largest for rank in camp)
    return others if len(largest) > len(others) else []
