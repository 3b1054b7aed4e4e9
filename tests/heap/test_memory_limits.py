"""The remaining memory is found in any enclosing control group, of either version, at any mount point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rt.memory import memory_limits
from moe_rt.memory.memory_limits import available_bytes

MIB = 2**20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
UNLIMITED = {V1: 2**63 - 4096, V2: "max"}
MOUNT_V1 = "32 31 0:29 {} {} rw,relatime shared:7 - cgroup cgroup rw,memory"
OTHERS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"""
MOUNT_V2 = "41 31 0:38 {} {} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


def write(root: Path, path: str, text: object) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def limit(root: Path, group: str, files: tuple[str, str, str], most: object, used: int, cached: int = 0) -> None:
    limit_file, used_file, prefix = files
    write(root, f"{group}/{limit_file}", most)
    write(root, f"{group}/{used_file}", used)
    write(root, f"{group}/memory.stat", f"anon 7\n{prefix}inactive_file {cached}\n{prefix}active_file 0\npgfault 9")


def machine(root: Path, own: str, mounts: str) -> None:
    write(root, "proc/meminfo", "MemTotal: 16384 kB\nMemAvailable:    8192 kB\nHugePages_Total: 0")
    write(root, "proc/self/cgroup", own)
    write(root, "proc/self/mountinfo", f"{OTHERS}\n{mounts}")


@pytest.mark.parametrize(("nested", "left"), [("/a/b/c", 1), ("/a/b", 2), ("/a", 3), ("", 4)], ids=str)
@pytest.mark.parametrize("version", [V1, V2], ids=["1", "2"])
def test_a_limit_of_any_group_around(tmp_path: Path, version: tuple[str, str, str], nested: str, left: int) -> None:
    """The tightest limit of any enclosing group counts: Slurm's job, systemd's scope or slice, a container's
    outermost."""
    is_v1 = version is V1
    own, at = ("4:memory:/a/b/c\n0::/x" if is_v1 else "0::/a/b/c"), "/sys/fs/cgroup" + "/memory" * is_v1
    machine(tmp_path, own, (MOUNT_V1 if is_v1 else MOUNT_V2).format("/", at))
    assert available_bytes(tmp_path) == 8 * MIB, "nothing is limited"
    for group in ("/a/b/c", "/a/b", "/a", "", "/a/b/sibling"):
        limit(tmp_path, at + group, version, UNLIMITED[version], 5 * MIB)
    limit(tmp_path, at + "/a/b/sibling", version, MIB, MIB)
    assert available_bytes(tmp_path) == 8 * MIB
    limit(tmp_path, at + nested, version, (10 + left) * MIB, 10 * MIB)
    assert available_bytes(tmp_path) == left * MIB
    limit(tmp_path, at + nested, version, 10 * MIB, 10 * MIB, cached=left * MIB)
    assert available_bytes(tmp_path) == left * MIB, "cached files are given up for who needs memory"
    limit(tmp_path, at + nested, version, 10 * MIB, 11 * MIB)
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("own", "mounted"),
    [
        ("/docker/1234", "/docker/1234"),  # the full path, of which only the group's part is mounted
        ("/docker/1234", "/"),  # the mount names the root, but has only the group's part
        ("/", "/"),
        ("/docker/1234", "/docker/12"),
        ("/../elsewhere", "/"),
    ],
)
@pytest.mark.parametrize("version", [V1, V2], ids=["1", "2"])
def test_a_container(tmp_path: Path, version: tuple[str, str, str], own: str, mounted: str) -> None:
    """A container's group is the root of its mount."""
    is_v1, at = version is V1, "/sys/fs/cgroup"
    machine(
        tmp_path, f"4:memory:{own}" if is_v1 else f"0::{own}", (MOUNT_V1 if is_v1 else MOUNT_V2).format(mounted, at)
    )
    limit(tmp_path, at, version, 6 * MIB, 4 * MIB)
    assert available_bytes(tmp_path) == 2 * MIB


def test_mounted_elsewhere_with_both_versions(tmp_path: Path) -> None:
    own = "0::/unified\n4:cpu,memory:/job 1"
    machine(tmp_path, own, MOUNT_V1.format("/", r"/my\040groups/mem") + "\n" + MOUNT_V2.format("/", "/two"))
    limit(tmp_path, "/my groups/mem/job 1", V1, 6 * MIB, 4 * MIB)
    assert available_bytes(tmp_path) == 2 * MIB
    limit(tmp_path, "/two/unified", V2, 6 * MIB, 5 * MIB)
    assert available_bytes(tmp_path) == MIB


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 4 kB")
    assert available_bytes(tmp_path) == 4096


def test_a_group_of_this_machine() -> None:
    """A process in a new group, limited to 64 MiB and inside this one's, sees at most that."""
    kind, own = next(memory_limits._own_groups(Path("/")), ("", Path("/nowhere")))
    group = own / f"moe_rt-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    program = f"""
import os
from pathlib import Path
Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
from moe_rt.memory.memory_limits import available_bytes
print(available_bytes())
"""
    try:
        (group / memory_limits._FILES[kind][0]).write_text(str(64 * MIB))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
        assert 0 < int(done.stdout) <= 64 * MIB, done.stderr
    except OSError as error:
        pytest.skip(f"the memory of a control group cannot be limited here: {error}")
    finally:
        group.rmdir()
