"""Names, keywords and defaults of what is public are those on record: docs/stability.md fixes them in 0.1.x.

After a change on purpose, with a line in CHANGELOG.md: python tests/docs/test_public_defaults.py
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.needs_transformers import require_transformers

from moe_rt.cli import main

HERE = Path(__file__).parent
RECORD = HERE / "public_defaults.json"
REFERENCE = HERE.parents[1] / "docs/api"


def documented() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each entry of the reference; of a module, those of its members."""
    for page in sorted(REFERENCE.glob("*.md")):
        for name, options in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", page.read_text() + "\n", re.MULTILINE):
            found = resolve_name(name)
            if not inspect.ismodule(found):
                yield name, found
                continue
            members = re.findall(r"\w+", options.partition("members:")[2])
            for member in members or [n for n in vars(found) if not n.startswith("_")]:
                yield f"{name}.{member}", getattr(found, member)


def functions_of(name: str, found: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield a function, or a class and its public methods, those of bases in this project included."""
    if not inspect.isclass(found):
        yield name, found
        return
    yield name, found
    for member in dir(found):
        value = getattr(found, member)
        if not member.startswith("_") and inspect.isroutine(value) and is_own(value):
            yield f"{name}.{member}", value


def is_own(made: Any) -> bool:
    return (getattr(made, "__module__", None) or "").startswith("moe_rt")


def arguments_of(made: Callable[..., Any]) -> dict[str, str]:
    """Return each argument's kind and default."""
    if is_dataclass(made):
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(made)}
        return {name: "required" if value is MISSING else shown(value) for name, value in defaults.items()}
    found = {}
    for p in inspect.signature(made).parameters.values():
        kind = "" if p.kind is p.POSITIONAL_OR_KEYWORD else f"{p.kind.description}, "
        found[p.name] = kind + ("required" if p.default is p.empty else shown(p.default))
    return found


def options_of(name: str, command: click.Command) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each command, and those in it, with its options."""
    context = click.Context(command)
    options = {"/".join(p.opts): shown(p.to_info_dict().get("default")) for p in command.get_params(context)}
    yield name, options
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            part = command.get_command(context, each)
            assert part is not None
            yield from options_of(f"{name} {each}", part)


def shown(value: Any) -> str:
    """Return a text that is the same in every process and Python."""
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value) if not hasattr(value, "as_posix") else value.as_posix())


def public() -> dict[str, dict[str, str]]:
    found = dict(options_of("moe-rt", main))
    for name, part in documented():
        if inspect.isroutine(part) or (inspect.isclass(part) and not issubclass(part, (BaseException, Enum))):
            found |= {each: arguments_of(made) for each, made in functions_of(name, part)}
    return dict(sorted(found.items()))


def test_what_is_public_is_on_record() -> None:
    require_transformers()
    record, now = json.loads(RECORD.read_text()), public()
    changed = {name: (record.get(name), now.get(name)) for name in record | now if record.get(name) != now.get(name)}
    assert changed == {}, "(on record, now); a change that users shall see is recorded by running this file"


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(arguments)}" for name, arguments in public().items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
