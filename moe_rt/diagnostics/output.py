"""Output of commands: a console wide enough for tables, and reports whose directory is made before anything runs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rt.errors import InvalidConfig

WIDTH = 160  # without a terminal


def console(**options: Any) -> Console:
    """Return a console as wide as the terminal, or wide enough for a table without one."""
    probe = Console(**options)
    return probe if probe.is_terminal else Console(**options, width=WIDTH)


def make_directory(directory: Path) -> None:
    """Make a directory for results and check that it is writable, before the work whose results would be lost.

    Raises:
        InvalidConfig: the directory does not exist and cannot be made, or nothing can be written in it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InvalidConfig(f"report: got {directory}, expected a directory to write in: {error}") from error


def write_document(document: dict[str, Any], path: Path) -> None:
    """Write readable JSON in one atomic step. A report writes it before anything derived from it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def with_section(document: str, name: str, text: str) -> str:
    """Return a Markdown document with `text` in the section between the comments `name:begin` and `name:end`.

    Raises:
        ValueError: the document has no such section.
    """
    begin, end = section_marks(name)
    head, found, rest = document.partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"got no section {begin} to {end}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def replace_section(path: Path, name: str, text: str) -> None:
    """Replace a section of a Markdown file; see `with_section`."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def section_marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
