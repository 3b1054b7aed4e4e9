"""Too little memory, a full /dev/shm, another user: an error of the family on every rank when the buffer is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cases_scarce as cases
import pytest
from harness import ProcessRanks, Ranks

from moe_rt.errors import OutOfSharedMemory
from moe_rt.heap import shm
from moe_rt.heap.rendezvous import ThreadGroup

MakeRanks = Callable[[str, int], Ranks]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or mount")

IN_FULL_SHM = """
mount -t tmpfs -o size=1m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=4k status=none 2>/dev/null
exec "$0" -c '
import torch
import torch.distributed as dist
from moe_rt import Buffer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sizes = dict(num_max_tokens_per_rank=512, hidden=512, num_topk=1, num_experts=1, dtype=torch.float32)
with Buffer(None, heap="shm", **sizes) as buffer:
    assert buffer.num_bytes > 2**20
    x = torch.randn(512, 512)
    results = buffer.dispatch(x, torch.zeros(512, 1, dtype=torch.int64), torch.ones(512, 1))
    assert torch.equal(buffer.combine(*results), x)
    print("right")
'
"""


@pytest.mark.parametrize(("limit", "num_bytes"), [("RLIMIT_AS", 2**30), ("RLIMIT_FSIZE", 2**20)])
def test_limit_of_one_rank_is_told_to_all(make_ranks: MakeRanks, limit: str, num_bytes: int) -> None:
    for text in make_ranks("shm", 3).run(cases.open_within_limit, limit, num_bytes):
        assert text.startswith("OutOfSharedMemory: rank 1 could not reserve a segment"), text


def test_limit_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before anything is taken: beyond it the kernel would kill."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    monkeypatch.setattr(shm, "Path", lambda path: tmp_path / Path(path).name)
    with pytest.raises(OutOfSharedMemory, match=r"got segments of 200000 bytes .*, expected at most 100000"):
        shm.allocate(ThreadGroup.make(1)[0], 200_000, 1.0)
    shm.allocate(ThreadGroup.make(1)[0], 65_536, 1.0).release()
    with pytest.raises(OutOfSharedMemory, match=r"got segments of 131072 bytes for all ranks .*, expected at most"):
        shm.allocate(ThreadGroup.make(2)[0], 65_536, 1.0)


@needs_root
def test_full_dev_shm_is_not_in_the_way() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode != 0:
        pytest.skip("a mount namespace cannot be made here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", IN_FULL_SHM, sys.executable], capture_output=True, text=True, timeout=3000
    )
    assert done.stdout == "right\n", done.stderr


@needs_root
def test_segment_of_another_user_is_refused() -> None:
    ranks = ProcessRanks(2)
    texts = ranks.outcomes(cases.open_as_another_user)
    ranks.close()
    assert all(isinstance(text, str) and text.startswith("SegmentPermission:") for text in texts), texts
