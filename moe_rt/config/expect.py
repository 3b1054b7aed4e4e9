"""The one way a value of a configuration is refused: naming the field, what was got and what was expected."""

from __future__ import annotations

from moe_rt.errors import InvalidConfig


def expect(condition: bool, field: str, got: object, expected: str) -> None:
    """Raises InvalidConfig unless `condition` holds."""
    if not condition:
        raise InvalidConfig(f"{field}: got {got}, expected {expected}")
