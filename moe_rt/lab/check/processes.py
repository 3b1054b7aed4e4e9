"""One process per GPU: rounds, ops compared with the links' bandwidth, and a process that is killed.

Run as a module, this is one of these processes. Without GPUs they are CPU ranks, which rehearses all but the copies.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.errors import GroupPoisoned, MoeRtError, PeerDead, PeerTimeout
from moe_rt.group.rendezvous import StoreRendezvous
from moe_rt.lab.check.measuring import OPS, Load, Timer, count_pulled
from moe_rt.lab.check.network import run_programs
from moe_rt.lab.check.steps import Check, Skipped, Table
from moe_rt.lab.testing.programs import end_with_starter
from moe_rt.lab.testing.rounds import WrongOutput, buffer_kwargs, expect, make_inputs, make_spec, play
from moe_rt.memory import nvshmem

ROUNDS, RUNS, WARM_UP = 3, 20, 5
TOKENS = (1, 128, 133, 4096)
DEATH_S, SLACK_S = 5.0, 5.0  # timeout of a wait for the killed process, and the tolerated delay
MODULE = "moe_rt.lab.check.processes"


def check(check: Check) -> None:
    size = check.nproc
    if size < 2:
        raise Skipped("one process; --nproc 8 runs one on each of 8 GPUs")
    deadline = time.monotonic() + check.seconds
    for name in PARTS:
        with check.part(name):
            report = _measured if name == "speed" else _say
            report(check, name, run_part(name, str(check.device), size, deadline - time.monotonic()))


def run_part(name: str, device: str, size: int, seconds: float) -> Any:
    """Run one part and return rank 0's findings."""
    killed = {size - 1: -signal.SIGKILL} if name == "killed" else {}
    job = {"part": name, "device": device, "seconds": seconds}
    return json.loads(run_programs(MODULE, job, size, seconds, killed)[0].splitlines()[-1])


def _say(check: Check, name: str, found: Any) -> None:
    check.say(f"{name}: {found}")


def _measured(check: Check, name: str, found: Any) -> None:
    read, write = found["read"], found["write"]
    columns = ["op", "tokens", "us", "GB/s", "of the links", "share"]
    rows = [[*row, round(row[3] / (read if row[4] == "read" else write), 3)] for row in found["ops"]]
    note = (
        f"of the slowest rank, medians; copies from all peers at once read {read:g} and to all write {write:g} GB/s, "
        "while all ranks do the same; GB/s of rows that cross a link"
    )
    check.add(Table(f"One process per GPU: R = {check.nproc}", columns, rows, note))
    check.say(f"links: {read:g} GB/s read, {write:g} GB/s written")


def run_rank(part: str, device: str, rank: int, size: int, store: str, seconds: float) -> None:
    """Run one process: join the group, run its part and print the findings as the last line."""
    on_gpu = device.startswith("cuda")
    where = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    world = dist.group.WORLD
    assert world is not None
    options = {"heap": "nvshmem" if on_gpu else "shm", "init_timeout_s": seconds}
    found = PARTS[part](world, where, options)
    print(json.dumps(found), flush=True)
    if part == "killed":
        os._exit(0)  # NVSHMEM and gloo cannot shut down cleanly without the dead process
    if on_gpu:
        nvshmem.shutdown(StoreRendezvous(world), seconds)
    dist.destroy_process_group()


def rounds(group: Any, device: torch.device, options: dict[str, Any]) -> str:
    """Forward and backward equal the reference."""
    spec = make_spec(group.size())
    with Buffer(group, timeout_s=20.0, **options, **buffer_kwargs(spec)) as buffer:
        for turn in range(ROUNDS):
            inputs = make_inputs(spec, [(5 * r + turn) % 13 for r in range(group.size())], 40 + turn)
            play(buffer, inputs, expect(spec, inputs, turn), device, tag=turn)
        buffer.check()
        dist.barrier()
    return f"{ROUNDS} rounds of {group.size()} processes equal"


def killed(group: Any, device: torch.device, options: dict[str, Any]) -> str:
    """The last process is killed between two ops. Each other one notices it in time, or that another one has.

    Raises:
        WrongOutput: they are not, or another error is raised.
    """
    spec = make_spec(group.size())
    x = torch.ones(4, spec.hidden, device=device)
    idx = torch.zeros(4, spec.num_topk, dtype=torch.int64, device=device)
    weights = torch.ones(4, spec.num_topk, device=device)
    buffer = Buffer(group, timeout_s=DEATH_S, **options, **buffer_kwargs(spec))
    buffer.dispatch(x, idx, weights)
    _finish(device)
    buffer.check()
    dist.barrier()
    if group.rank() == group.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error: MoeRtError | None = None
    try:
        buffer.dispatch(x, idx, weights)
        while error is None and time.monotonic() < begin + DEATH_S + SLACK_S:
            buffer.check()
            time.sleep(0.01)
    except MoeRtError as raised:
        error = raised
    seconds = time.monotonic() - begin
    expected = (PeerTimeout, PeerDead, GroupPoisoned)
    if not isinstance(error, expected) or seconds > DEATH_S + SLACK_S:
        names = " or ".join(kind.__name__ for kind in expected)
        raise WrongOutput(f"a killed process: got {error!r} after {seconds:.1f} s, expected {names}")
    return f"{type(error).__name__} {seconds:.1f} s after a process was killed"


def speed(group: Any, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of each op and the bytes that cross links, and the bandwidth of copies between peers."""
    found: dict[str, Any] = {"ops": []}
    for tokens in TOKENS:
        size = group.size()
        load = Load(size, tokens) if device.type == "cuda" else Load(size, min(tokens, 16), 64, 2, 8)
        found["ops"] += pairs(group, device, options, load)
    for way in ("read", "write"):
        found[way] = float(f"{ceiling(group, device, way) / 1e9:.4g}")
    return found


def pairs(group: Any, device: torch.device, options: dict[str, Any], load: Load) -> list[list[Any]]:
    generator = torch.Generator(device).manual_seed(group.rank())
    x = torch.randn(load.tokens, load.hidden, generator=generator, device=device).bfloat16()
    weights, idx = torch.rand(load.tokens, load.experts, generator=generator, device=device).topk(load.topk)
    with Buffer(group, **options, **load.buffer_kwargs()) as buffer, torch.no_grad():
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        calls: dict[str, Callable[[], object]] = {
            "dispatch": lambda: buffer.dispatch(x, idx, weights),
            "combine": lambda: buffer.combine(recv_x, recv_weights, handle),
        }
        seconds = {op: slowest(_median(calls[op], device)) for op in OPS}
        buffer.check()
        dist.barrier()
    owner = idx // (load.experts // group.size())
    own = int((owner == group.rank()).any(dim=1).sum())
    crossing = (count_pulled(idx, load.experts, group.size()) - own) * load.hidden * 2
    return [
        [op, load.tokens, float(f"{s * 1e6:.4g}"), float(f"{crossing / s / 1e9:.4g}"), way]
        for (op, s), way in zip(seconds.items(), ("read", "write"), strict=True)
    ]


def ceiling(group: Any, device: torch.device, way: str) -> float:
    """Bytes per second between this GPU and all others concurrently, while all ranks do the same; the slowest
    rank's."""
    on_gpu = device.type == "cuda"
    num_bytes = 64 << 20 if on_gpu else 1 << 16
    peers = [torch.device("cuda", r) if on_gpu else device for r in range(group.size()) if r != group.rank()]
    here = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in peers]
    there = [torch.ones(num_bytes, dtype=torch.uint8, device=peer) for peer in peers]
    pairs = list(zip(here, there, strict=True) if way == "read" else zip(there, here, strict=True))

    def copy() -> None:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)

    return len(peers) * num_bytes / slowest(_median(copy, device))


def slowest(seconds: float) -> float:
    """Maximum over all ranks."""
    most: Tensor = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def _median(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(WARM_UP + RUNS):
        dist.barrier()
        timer = Timer() if device.type == "cuda" else HostTimer()
        timer.start()
        call()
        timer.stop()
        _finish(device)
        times.append(timer.seconds())
    return statistics.median(times[WARM_UP:])


class HostTimer:
    """Timer for ranks without a GPU."""

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def seconds(self) -> float:
        return self._end - self._begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PARTS: dict[str, Callable[[Any, torch.device, dict[str, Any]], Any]] = {
    "rounds": rounds,
    "speed": speed,
    "killed": killed,
}

if __name__ == "__main__":
    end_with_starter()
    run_rank(**json.loads(sys.argv[1]))
