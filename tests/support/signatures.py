"""Values for every option of a function, each unlike its default and unlike any other, made from its signature.

A test passes them and looks where each arrives: options of one type that are swapped on the way are then noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints


def defaults_of(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's, or a dataclass's, optional arguments."""
    if is_dataclass(made):
        return {f.name: f.default for f in fields(made) if f.default is not inspect.Parameter.empty}
    found = inspect.signature(made).parameters.values()
    return {p.name: p.default for p in found if p.default is not p.empty and p.kind is p.KEYWORD_ONLY}


def unlike_defaults(made: Callable[..., Any], leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return a value for each optional argument but those to leave out."""
    hints = get_type_hints(made.__init__ if isinstance(made, type) and not is_dataclass(made) else made)
    options = {name: default for name, default in defaults_of(made).items() if name not in set(leave_out)}
    return {name: _unlike(default, hints[name], number) for number, (name, default) in enumerate(options.items())}


def _unlike(default: Any, hint: Any, number: int) -> Any:
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        literals = [value for part in (hint, *get_args(hint)) for value in get_args(part) if isinstance(value, str)]
        return next(value for value in literals if value != default)
    kinds = {type(default), hint, *get_args(hint)}
    if float in kinds:
        return 2.5 + number
    if int in kinds:
        return 32 + number
    raise TypeError(f"got a default {default!r} of {hint}, expected a number, a flag or a literal: leave it out")


def misplaced(given: dict[str, Any], arrived: Any) -> dict[str, Any]:
    """Return what arrived in another place than under its name, in a mapping or in attributes."""
    found = {n: arrived.get(n) if isinstance(arrived, dict) else getattr(arrived, n, None) for n in given}
    return {name: (found[name], value) for name, value in given.items() if found[name] != value}
