"""Turns every op of an engine into its two halves, so that tests of whole ops test halves.

With MOE_RT_TEST_HALVES=1 in the environment every engine of a test run is made so. A larger number is the seed of naps
between the halves.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from moe_rt.engine.engine import Engine
from moe_rt.errors import Op

OPS = {
    "dispatch": Op.DISPATCH,
    "dispatch_scaled": Op.DISPATCH,
    "combine": Op.COMBINE,
    "dispatch_backward": Op.DISPATCH_BACKWARD,
    "combine_backward": Op.COMBINE_BACKWARD,
    "combine_tokens_backward": Op.COMBINE_BACKWARD,
}


def halve(engine: Engine, between: Callable[[], Any] = lambda: None) -> None:
    """Make each op of the engine begin, call `between`, and finish. A combine into `out` stays whole."""
    for method, op in OPS.items():
        setattr(engine, method, _halved(engine, op, method, getattr(engine, method), between))


def _halved(engine: Engine, op: Op, method: str, whole: Callable[..., Any], between: Callable[[], Any]) -> Any:
    def run(*given: Any, start: Any = None, **options: Any) -> Any:
        if start is not None or options:
            return whole(*given, **options) if start is None else whole(*given, start=start, **options)
        if method == "combine" and len(given) == 6:
            return whole(*given)
        ticket = engine.begin(op, method, *given)
        between()
        return engine.finish(method, ticket)

    return run


def halve_all_engines() -> None:
    """Do so for every engine that is made from now on, if the environment says so."""
    seed = int(os.environ.get("MOE_RT_TEST_HALVES", "0"))
    if seed == 0:
        return
    pace, make = random.Random(f"{seed} {os.getpid()}"), Engine.__init__

    def nap() -> None:
        if seed > 1 and pace.random() < 0.05:
            time.sleep(pace.random() * 0.01)

    def make_halved(self: Engine, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        halve(self, nap)

    Engine.__init__ = make_halved  # type: ignore[method-assign]
