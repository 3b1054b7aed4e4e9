"""Time until a rank notices that its peer was killed, by the amount of memory that the kernel has to free.

    python -m moe_rt.lab.chaos.deaths --gib 0 --gib 2 --gib 8 --kills 40 --write docs/reliability.md

The last line is one JSON document; the exit status is 1 if a survivor raised anything but PeerDead.
"""

from __future__ import annotations

import json
import mmap
import random
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from moe_rt.buffer.buffer import Buffer
from moe_rt.diagnostics.output import replace_section
from moe_rt.errors import MoeRtError
from moe_rt.lab.chaos.outcome import origin, span
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks

VICTIM = 1  # the ranks are 0 and 1
TOKENS, HIDDEN = 8, 32
PATIENCE_S = 60.0
WAITED_S = (0.05, 0.15)  # time for which the survivor has waited when its peer is killed


@dataclass(frozen=True)
class Death:
    """One kill: the survivor's error, and milliseconds until it was raised and until the victim was completely gone."""

    gib: float
    raised: str
    noticed_ms: float
    gone_ms: float


def kill_one(gib: float, pace: random.Random) -> Death:
    """Start two ranks, and kill one that holds `gib` GiB while the other waits for it."""
    with tempfile.TemporaryDirectory(prefix="moe_rt_deaths_") as directory, ProcessRanks() as pool:
        for rank in range(2):
            pool.start(rank, _live, rank, f"{directory}/store", gib if rank == VICTIM else 0.0)
        for rank in range(2):
            _receive(pool, rank)  # ready
        time.sleep(pace.uniform(*WAITED_S))
        start = time.monotonic()
        pool.send_signal(VICTIM, signal.SIGKILL)
        pool.await_end(VICTIM, PATIENCE_S)
        end = time.monotonic()
        report = json.loads(_receive(pool, 1 - VICTIM))
    return Death(gib, report["raised"], 1e3 * (report["at"] - start), 1e3 * (end - start))


def _live(channel: Channel, rank: int, store: str, gib: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = mmap.mmap(-1, max(1, int(gib * 2**30)), flags=flags)
    sizes: dict[str, Any] = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": 1, "num_experts": 2}
    buffer = Buffer(None, **sizes, dtype=torch.float32, timeout_s=PATIENCE_S)
    tokens = torch.randn(TOKENS, HIDDEN), torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1)
    buffer.combine(*buffer.dispatch(*tokens))
    channel.send(b"ready")
    if rank == VICTIM:
        time.sleep(2 * PATIENCE_S)
        memory.close()
    raised = "nothing"
    try:
        buffer.dispatch(*tokens)
    except MoeRtError as error:
        raised = type(error).__name__
    channel.send(json.dumps({"raised": raised, "at": time.monotonic()}).encode())
    time.sleep(PATIENCE_S)  # until killed


def _receive(pool: ProcessRanks, rank: int) -> bytes:
    try:
        return pool.receive(rank, 2 * PATIENCE_S)
    except (EOFError, TimeoutError) as error:
        why = "its end" if isinstance(error, EOFError) else f"nothing for {2 * PATIENCE_S:g} s"
        raise click.ClickException(f"rank {rank}: got {why}, expected a message") from error


def markdown(deaths: list[Death], command: str) -> str:
    """The table and its origin."""
    lines = [
        origin(2, command),
        "Milliseconds from the kill, median / worst.",
        "",
        "| GiB of the process killed | Kills | until its peer raised `PeerDead` | until nothing was left of it |",
        "|---|---|---|---|",
    ]
    for gib in dict.fromkeys(death.gib for death in deaths):
        same = [death for death in deaths if death.gib == gib]
        spans = [span([d.noticed_ms for d in same]), span([d.gone_ms for d in same])]
        lines.append(f"| {gib:g} | {len(same)} | {spans[0]} | {spans[1]} |")
    return "\n".join(lines)


@click.command()
@click.option("--gib", "sizes", type=click.FloatRange(min=0), multiple=True, default=(0.0, 2.0), show_default=True)
@click.option("--kills", type=click.IntRange(min=1), default=10, show_default=True, help="Kills per size.")
@click.option("--seed", default=0, show_default=True, help="Seed of the survivor's waiting times.")
@click.option(
    "--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Document that holds the table."
)
def main(sizes: tuple[float, ...], kills: int, seed: int, write: Path | None) -> None:
    """Kill ranks that hold memory, and measure how soon the rank that waits for them raises."""
    pace, deaths = random.Random(seed), []
    for gib in sizes:
        for _ in range(kills):
            deaths.append(kill_one(gib, pace))
    options = "".join(f" --gib {gib:g}" for gib in sizes)
    table = markdown(deaths, f"python -m moe_rt.lab.chaos.deaths{options} --kills {kills}")
    click.echo(table)
    if write is not None:
        replace_section(write, "deaths", table)
    click.echo(json.dumps([asdict(death) for death in deaths], separators=(",", ":")))
    wrong = sorted({death.raised for death in deaths} - {"PeerDead"})
    if wrong:
        raise click.ClickException(f"survivors raised {', '.join(wrong)}, expected PeerDead")


if __name__ == "__main__":
    main()
