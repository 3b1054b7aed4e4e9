"""Environments for tests: a fresh Python that has what moe_rt requires, by links to what is installed here."""

from __future__ import annotations

import importlib.metadata
import os
import venv
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str, extras: frozenset[str]) -> dict[str, Distribution]:
    """What pip installs with `name[extras]`, by name, as far as it is installed here; MPI, say, need not be."""
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
    """Puts links to a distribution's files into `site`, those that Python has compiled, too: that takes long."""
    for file in distribution.files or ():
        if ".." not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(distribution.locate_file(file))


def make(path: Path, extra: str) -> Path:
    """The site-packages of a new environment at `path`: what moe_rt with this extra requires, without moe_rt itself."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(path)
    (site,) = path.glob("lib/python*/site-packages")
    distributions = closure("moe_rt", frozenset({extra} if extra else ()))
    del distributions["moe_rt"]
    for distribution in distributions.values():
        link(site, distribution)
    return site


def variables(**changed: str) -> dict[str, str]:
    """The environment variables of a process that shall see nothing of the environment that runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | changed
