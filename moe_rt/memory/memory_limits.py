"""Memory that this process may still take, under the limits of the machine and of its control groups.

All groups that a control group is nested in limit it. Slurm's jobs, systemd's scopes and containers set their limit in
one of them, seldom in the outermost, and version 1 of control groups names its files differently from version 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# The limit, its usage, and the entries of memory.stat that count cached files. Version 2 has one hierarchy for all
# controllers, version 1 one for memory.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def available_bytes(root: Path = _ROOT) -> int:
    """Return the memory that can be taken before the system kills a process for lack of it.

    Args:
        root: directory of /proc and of the mounts that it lists.
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    machine = int(meminfo["MemAvailable"].split()[0]) * 1024
    return min([machine, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    for kind, group in _own_groups(root):
        limit_file, used_file, cached = _FILES[kind]
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max" in it
            limit, used = int((group / limit_file).read_text()), int((group / used_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # A job that has read its data set has used its whole limit: the system drops cached files before it kills.
            yield max(limit - used + sum(int(stat.get(name, 0)) for name in cached), 0)


def _own_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the control groups that this process is in, from the innermost outwards as far as they are mounted."""
    own = dict(_own_paths(root))
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            kind, options = source.split(" ")[0], source.rpartition(" ")[2].split(",")
            if kind not in own or (kind == "cgroup" and "memory" not in options):
                continue
            mounted, at = (_unescaped(path) for path in mount.split(" ")[3:5])
            # A container may see only its part of the hierarchy, but its path in the whole. The mount then is its own
            # group.
            inside = own[kind].removeprefix(mounted.rstrip("/")) if _is_in(own[kind], mounted) else ""
            names = [name for name in inside.split("/") if name]
            for depth in range(len(names), -1, -1):
                yield kind, Path(root, at.lstrip("/"), *names[:depth])


def _own_paths(root: Path) -> Iterator[tuple[str, str]]:
    """Yield this process's group for each version that counts memory, from /proc/self/cgroup."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield "cgroup2", path
            elif "memory" in controllers.split(","):
                yield "cgroup", path


def _is_in(path: str, parent: str) -> bool:
    return (path == parent or path.startswith(parent.rstrip("/") + "/")) and ".." not in path.split("/")


def _unescaped(path: str) -> str:
    """Decode a path of mountinfo, which has blanks and the like as octal numbers."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
