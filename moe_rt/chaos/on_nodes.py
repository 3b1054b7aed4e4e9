"""Actions of `moe-rt chaos --nodes`: faults of ranks, of nodes and of links."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moe_rt.chaos.interrupt import Interrupt
from moe_rt.chaos.link_faults import draw_link_fault
from moe_rt.chaos.misbehaviour import RAISED, Misbehaviour
from moe_rt.chaos.node_deaths import draw_kill, draw_stop
from moe_rt.chaos.node_pool import NodePool
from moe_rt.chaos.outcome import Trial

KILLS, STOPS, LINKS = ("kill", "ranks", "node"), ("stop", "pause"), ("cut", "flap", "blink", "slow", "lossy")
ACTIONS = (*KILLS, *STOPS, *LINKS, *RAISED, "interrupt")


def draw(action: str, pace: random.Random, nodes: Sequence[int]) -> Trial[NodePool]:
    """Draw any rank, node and moment."""
    if action in KILLS:
        return draw_kill(action, pace, sum(nodes))
    if action in STOPS:
        return draw_stop(action, pace, sum(nodes))
    if action in LINKS:
        return draw_link_fault(action, pace, len(nodes))
    if action in RAISED:
        return Misbehaviour.draw(action, pace, sum(nodes))
    return Interrupt.draw(pace, sum(nodes))
