"""A rank whose code raises announces it to its peers: inside backward, without a context manager, at the process's
end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CPU_HEAPS
from faults import cases_injected as cases
from support.ranks import Ranks

from moe_rt import ThreadGroup

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3
SCRIPT = """
import sys, torch.distributed as dist
from faults.cases_injected import raise_without_with
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
raise_without_with(dist.group.WORLD, faulty_rank=1)
"""


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_raising_inside_backward(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.raise_in_backward, FAULTY_RANK)
    assert texts[FAULTY_RANK].startswith("KeyError")
    assert all(texts[rank].startswith("GroupPoisoned:") for rank in (0, 2)), texts


def test_a_process_that_ends_by_an_exception(tmp_path: Path) -> None:
    """The peers' wait ends by the rank's announcement at interpreter exit, or by its death."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    here = Path(__file__).parent
    path = {"PYTHONPATH": f"{here}:{here.parent}"}
    ranks = [
        subprocess.Popen([*command, str(r)], env={**os.environ, **path}, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    said, _ = ranks[0].communicate(timeout=3000)
    assert ranks[1].wait(800) == 1
    assert said.split()[0] in ("GroupPoisoned", "PeerDead"), "not PeerTimeout: " + said


def test_a_thread_that_ends_by_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    """A dead thread's buffer is garbage collected, and announces its close to the peers."""
    threads = [threading.Thread(target=cases.raise_without_with, args=(g, FAULTY_RANK)) for g in ThreadGroup.make(SIZE)]
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        threading.excepthook = hook
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 2
    for line in said:
        assert line.split()[0] in ("GroupClosed", "GroupPoisoned"), "not PeerTimeout: " + line
