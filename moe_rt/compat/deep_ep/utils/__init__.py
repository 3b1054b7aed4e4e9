"""DeepEP's helpers, of which its tests and users import these modules: envs, event, math and testing."""

from __future__ import annotations

from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
