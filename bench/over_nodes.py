"""What a dispatch and its combine take between two emulated nodes of one rank each, over heap "ucx".

As root: python bench/over_nodes.py [RATE], with a rate as tc writes it, such as 1gbit. All tokens go to the other rank
and come back: rows of 14,336 bytes. Prints the quickest and the median, each of the slower rank.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_rt import Buffer
from moe_rt.heap.ucx import await_peers
from moe_rt.nodes.cluster import Cluster

HIDDEN = 7168  # of bf16: 14,336 bytes
MANY, MANY_REPEATS, FEW_REPEATS, WARM_UP = 1024, 15, 400, 5
PORT = 29511


def main() -> None:
    with Cluster(f"bench_{os.getpid()}") as cluster:
        cluster.up(2, *sys.argv[1:2])
        command = [sys.executable, "-m", "moe_rt", "nodes", "run", "--cluster", cluster.name]
        ranks = [
            subprocess.Popen([*command, str(rank), "--", sys.executable, __file__, "rank", str(rank)])
            for rank in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))


def serve(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://10.78.0.1:{PORT}", rank=rank, world_size=2)
    sizes = dict(num_max_tokens_per_rank=MANY, hidden=HIDDEN, num_topk=1, num_experts=2, dtype=torch.bfloat16)
    with Buffer(dist.group.WORLD, heap="ucx", **sizes) as buffer:
        for tokens, repeats in ((1, FEW_REPEATS), (MANY, MANY_REPEATS)):
            x = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
            idx, weights = torch.full((tokens, 1), 1 - rank), torch.ones(tokens, 1)
            dispatches, combines = [], []
            for _ in range(repeats + WARM_UP):
                dist.barrier()
                seconds, (recv_x, recv_weights, handle) = timed(lambda: buffer.dispatch(x, idx, weights))  # noqa: B023
                dispatches.append(seconds)
                seconds, y = timed(lambda: buffer.combine(recv_x, recv_weights, handle))  # noqa: B023
                combines.append(seconds)
            assert torch.equal(y, x)
            tell(rank, tokens, dispatches[WARM_UP:], combines[WARM_UP:])
    dist.barrier()
    dist.destroy_process_group()
    await_peers()


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def tell(rank: int, tokens: int, *seconds: list[float]) -> None:
    found = torch.tensor([[min(s), statistics.median(s)] for s in seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        for name, both in zip(("dispatch", "combine"), found.tolist(), strict=True):
            rates = ", ".join(f"{tokens * HIDDEN * 2 / s / 1e6:.0f}" for s in both)
            print(f"T={tokens} {name}: {both[0] * 1e6:.0f}, {both[1] * 1e6:.0f} us; {rates} MB/s each way", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        serve(int(sys.argv[2]))
    else:
        main()
