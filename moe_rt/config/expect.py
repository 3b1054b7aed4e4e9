"""The check by which every invalid configuration value is refused, with a uniform message."""

from __future__ import annotations

from moe_rt.errors import InvalidConfig


def expect(condition: bool, field: str, got: object, expected: str) -> None:
    """Raise InvalidConfig, which names the field, what was got and what was expected, unless `condition` holds."""
    if not condition:
        raise InvalidConfig(f"{field}: got {got}, expected {expected}")
