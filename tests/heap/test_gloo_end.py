"""Python exits cleanly although a thread of gloo still holds a tensor at the program's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The handler registered first runs last: it keeps the interpreter's lock until gloo's thread waits for it.
PROGRAM = """
import atexit
import ctypes
atexit.register(ctypes.PyDLL(None).sleep, 1)

import torch
import torch.distributed as dist
from moe_rt import Buffer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Buffer(None, num_max_tokens_per_rank=4, hidden=8, num_topk=1, num_experts=2, dtype=torch.float32).close()
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def slow_gloo(tmp_path: Path) -> Path:
    library = tmp_path / "slow_gloo.so"
    source = Path(__file__).with_name("slow_gloo.c")
    subprocess.run(["gcc", "-Werror", "-Wall", "-Wextra", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def test_a_late_thread_does_not_abort_the_process(slow_gloo: Path) -> None:
    environment = os.environ | {"LD_PRELOAD": str(slow_gloo)}
    assert subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=3000).returncode == 0
