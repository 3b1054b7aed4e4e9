"""Too little memory, a full /dev/shm, or another user raises a MoeRtError on every rank when the buffer is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import cases_scarce as cases
from support.ranks import ProcessRanks, Ranks

from moe_rt.errors import OutOfSharedMemory
from moe_rt.group.processes import why_closed
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.memory import shm

MakeRanks = Callable[[str, int], Ranks]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or mount")

FULL = "mount -t tmpfs -o size=1m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=4k status=none 2>/dev/null"
GONE = """
set -e
for file in null zero full random urandom; do touch "$1/$file"; mount --bind "/dev/$file" "$1/$file"; done
mount --rbind "$1" /dev
test ! -e /dev/shm
"""
TWO_RANKS = """
exec "$0" -c '
import os, sys
import torch
import torch.distributed as dist
from moe_rt import Buffer

child = os.fork()
rank = 1 if child == 0 else 0
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + ".store", 2), rank=rank, world_size=2)
sizes = dict(num_max_tokens_per_rank=512, hidden=512, num_topk=1, num_experts=2, dtype=torch.float32)
with Buffer(None, heap="shm", **sizes) as buffer:
    assert buffer.num_bytes > 2**20
    x = torch.randn(512, 512)
    results = buffer.dispatch(x, torch.full((512, 1), 1 - rank), torch.ones(512, 1))
    assert torch.equal(buffer.combine(*results), x)
if rank == 0 and os.waitpid(child, 0)[1] == 0:
    print("right")
' "$1"
"""


@pytest.mark.parametrize(("limit", "num_bytes"), [("RLIMIT_AS", 2**30), ("RLIMIT_FSIZE", 2**20)])
def test_limit_of_one_rank_is_reported_to_all(make_ranks: MakeRanks, limit: str, num_bytes: int) -> None:
    for text in make_ranks("shm", 3).run(cases.open_within_limit, limit, num_bytes):
        assert text.startswith("OutOfSharedMemory: rank 1 could not reserve a segment"), text


def test_limit_of_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is checked before memory is allocated: beyond it the kernel would kill the process."""
    monkeypatch.setattr(shm, "available_bytes", lambda: 100_000)
    with pytest.raises(OutOfSharedMemory, match=r"got segments of 200000 bytes .*, expected at most 100000"):
        shm.allocate(ThreadGroup.make(1)[0], 200_000, 1.0)
    shm.allocate(ThreadGroup.make(1)[0], 65_536, 1.0).release()
    with pytest.raises(OutOfSharedMemory, match=r"got segments of 131072 bytes for all ranks .*, expected at most"):
        shm.allocate(ThreadGroup.make(2)[0], 65_536, 1.0)


@needs_root
@pytest.mark.parametrize("before", [FULL, GONE], ids=["full", "gone"])
def test_full_dev_shm_is_not_in_the_way(before: str, tmp_path: Path) -> None:
    """A full or missing /dev/shm does not prevent a buffer."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode != 0:
        pytest.skip("a mount namespace cannot be made here")
    command = ["unshare", "-m", "sh", "-c", before + TWO_RANKS, sys.executable, str(tmp_path / "dev")]
    (tmp_path / "dev").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.stdout == "right\n", done.stderr


@needs_root
def test_segment_of_another_user_is_refused() -> None:
    ranks = ProcessRanks(2)
    texts = ranks.outcomes(cases.open_as_another_user)
    ranks.close()
    assert all(isinstance(text, str) and text.startswith("SegmentPermission:") for text in texts), texts
    # Each of the two ranks refuses the other; the first refusal is the cause on both.
    causes = ("is of user 0, this one of user 65534; ranks must be", "got device, inode, size, user, seals")
    assert any(cause in texts[1] for cause in causes), texts


def test_segment_of_a_process_that_is_not_dumpable_is_refused() -> None:
    """A non-dumpable process's segment is refused on every rank with that cause; the error does not blame different
    users."""
    ranks = ProcessRanks(2)
    texts = ranks.run(cases.open_while_not_dumpable)
    ranks.close()
    for text in texts:
        assert text.startswith(
            "SegmentPermission: rank 0 cannot open the segment of rank 1 (Permission denied): process "
        )
        assert "is not dumpable: " in text
        assert "prctl(PR_SET_DUMPABLE, 1)" in text


def test_why_a_process_that_is_not_here_stays_closed() -> None:
    assert why_closed(2**30) == f"no process {2**30} is here; ranks must be processes of one process-id namespace"
    assert why_closed(os.getpid()).startswith(f"process {os.getpid()} is of the same user, but ")
