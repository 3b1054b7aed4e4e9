"""Two ranks over heap "ucx", one of which gets SIGHUP between two ops: prints the other's error, and the exit status.

python closed_terminal_job.py STORE
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from moe_rt import Buffer
from moe_rt.errors import MoeRtError

SIZES = dict(num_max_tokens_per_rank=8, hidden=16, num_topk=1, num_experts=2, dtype=torch.float32)


def rank(number: int, ready: int) -> str:
    """Return the name of the error that the second op raises."""
    os.environ["UCX_NET_DEVICES"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=number, world_size=2)
    buffer = Buffer(dist.group.WORLD, heap="ucx", timeout_s=600.0, **SIZES)
    inputs = torch.zeros(8, 16), torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1)
    buffer.dispatch(*inputs)
    os.write(ready, b"x")
    if number == 1:
        signal.pause()
        return "nothing"
    try:
        buffer.dispatch(*inputs)
    except MoeRtError as error:
        return type(error).__name__
    return "nothing"


def main() -> None:
    readies, ready = os.pipe()
    told, tell = os.pipe()
    pids = []
    for number in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.write(tell, rank(number, ready).encode())
            os._exit(0)
    for _ in pids:
        os.read(readies, 1)
    os.kill(pids[1], signal.SIGHUP)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in reversed(pids)]
    print(f"{os.read(told, 64).decode()}, {ends[0]}")


main()
