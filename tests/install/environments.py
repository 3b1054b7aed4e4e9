"""Environments for tests: a fresh Python with what moe_rt requires, as links to the packages installed here."""

from __future__ import annotations

import importlib.metadata
import os
import venv
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str, extras: frozenset[str]) -> dict[str, Distribution]:
    """Return all installed distributions that pip would install for `name[extras]`, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(name, extras)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = found.setdefault(name, importlib.metadata.distribution(name))
        except PackageNotFoundError:
            continue
        for line in distribution.requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                todo.append((requirement.name, frozenset(requirement.extras)))
    return found


def link(site: Path, distribution: Distribution) -> None:
    """Link a distribution's files into `site`, also the compiled bytecode, which takes long to make."""
    for file in distribution.files or ():
        if ".." not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(distribution.locate_file(file))


def make(path: Path, extra: str) -> Path:
    """Make an environment at `path` with the requirements of moe_rt and this extra; return its site-packages."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(path)
    (site,) = path.glob("lib/python*/site-packages")
    distributions = closure("moe_rt", frozenset({extra} if extra else ()))
    del distributions["moe_rt"]
    for distribution in distributions.values():
        link(site, distribution)
    return site


def variables(**changed: str) -> dict[str, str]:
    """Return environment variables that hide the environment that runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | changed
