"""What commands say: a console wide enough for tables, and reports whose directory is made before anything is run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rt.errors import InvalidConfig

WIDTH = 160  # where there is no terminal


def console(**options: Any) -> Console:
    """As wide as the terminal, or wide enough for a table where there is none."""
    probe = Console(**options)
    return probe if probe.is_terminal else Console(**options, width=WIDTH)


def make_directory(directory: Path) -> None:
    """Before the work whose results shall be written there: afterwards it would be lost.

    Raises:
        InvalidConfig: the directory is not there and cannot be made, or nothing can be written in it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InvalidConfig(f"report: got {directory}, expected a directory to write in: {error}") from error


def write_document(document: dict[str, Any], path: Path) -> None:
    """As JSON to read; a report writes it before all that is made from it."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def with_section(document: str, name: str, text: str) -> str:
    """A Markdown document with text in the section between the comments `name:begin` and `name:end`.

    Raises:
        ValueError: it has no such section.
    """
    begin, end = section_marks(name)
    head, found, rest = document.partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"got no section {begin} to {end}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def replace_section(path: Path, name: str, text: str) -> None:
    """The same in a file."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def section_marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
