"""The command `moe-rt diff`: names the first op whose digests differ between two runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from moe_rt.diagnostics.digests import REPLICATED, VERSION
from moe_rt.errors import InvalidConfig, expect

Key = tuple[Any, ...]  # step, micro-batch, layer, op, tensor, way
SHOWN_TOKENS = 10


@dataclass
class Run:
    """Digests of one run.

    Attributes:
        by_rank: for each key, in rank 0's order, the digest of each rank that has one.
        tokens: for each key, each rank's digests of its tokens, if they were written.
    """

    num_ranks: int
    by_rank: dict[Key, dict[int, int]] = field(default_factory=dict)
    tokens: dict[Key, dict[int, list[str]]] = field(default_factory=dict)

    def total(self, key: Key) -> int:
        """Return the digest over all ranks, in which it does not matter on which rank a row was."""
        digests = self.by_rank[key]
        return digests[min(digests)] if key[4] == REPLICATED else sum(digests.values()) % (1 << 64)

    def all_tokens(self, key: Key) -> list[str]:
        """Return digests of all tokens, in the order of ranks."""
        return [token for _, own in sorted(self.tokens.get(key, {}).items()) for token in own]


def read(directory: str | Path) -> Run:
    """Read the files of one run.

    Raises:
        InvalidConfig: files are missing, or one is not a file of digests.
    """
    files = sorted(Path(directory).glob("rank-*.jsonl"))
    expect(bool(files), f"digests {directory}", "no file rank-*.jsonl", "one for each rank")
    run: Run | None = None
    for path in files:
        try:
            with path.open() as lines:
                header = json.loads(next(lines, ""))
                expect(header.get("version") == VERSION, f"{path}: version", header.get("version"), f"{VERSION}")
                rank, num_ranks = header["rank"], header["num_ranks"]
                run = run or Run(num_ranks)
                expect(num_ranks == run.num_ranks, f"{path}: num_ranks", num_ranks, f"{run.num_ranks}, as rank 0")
                for line in lines:
                    _add(run, rank, json.loads(line))
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            if isinstance(error, InvalidConfig):
                raise
            raise InvalidConfig(f"{path}: got {error}, expected a file of moe_rt.diagnostics.digest") from error
    assert run is not None
    expect(len(files) == run.num_ranks, f"digests {directory}", f"{len(files)} files", f"{run.num_ranks}, one a rank")
    return run


def _add(run: Run, rank: int, record: list[Any]) -> None:
    key = tuple(record[:6])
    run.by_rank.setdefault(key, {})[rank] = int(record[6], 16)
    if len(record) > 7:
        run.tokens.setdefault(key, {})[rank] = record[7]


def first_difference(a: Run, b: Run) -> str | None:
    """Say where the runs part first; None if all digests are equal."""
    for key in a.by_rank:
        if key not in b.by_rank:
            return f"{_place(key)}: only the first run has it"
        if a.total(key) != b.total(key):
            return f"{_place(key)}: {a.total(key):016x} and {b.total(key):016x}{_where(a, b, key)}"
    more = next((key for key in b.by_rank if key not in a.by_rank), None)
    return None if more is None else f"{_place(more)}: only the second run has it"


def _place(key: Key) -> str:
    step, call, layer, op, what, way = key
    if way == "step":
        return f"step {step}, after the optimizer: {what} {layer}"
    tensor = f"gradient of {what}" if way == "backward" else what
    return f"step {step}, micro-batch {call}, layer {layer}, {op} {way}: {tensor}"


def _where(a: Run, b: Run, key: Key) -> str:
    """Name the ranks that differ, if both runs have equally many, and the tokens, if they were written."""
    said = ""
    if a.num_ranks == b.num_ranks > 1:
        ranks = [r for r in range(a.num_ranks) if a.by_rank[key].get(r) != b.by_rank[key].get(r)]
        said += f", on ranks {', '.join(map(str, ranks))}"
    ours, theirs = a.all_tokens(key), b.all_tokens(key)
    if ours and len(ours) == len(theirs):
        tokens = [i for i, (one, two) in enumerate(zip(ours, theirs, strict=True)) if one != two]
        shown = ", ".join(map(str, tokens[:SHOWN_TOKENS])) + (", ..." if len(tokens) > SHOWN_TOKENS else "")
        said += f", {len(tokens)} of {len(ours)} tokens: {shown}"
    return said


@click.command()
@click.argument("run_a", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("run_b", type=click.Path(exists=True, file_okay=False, path_type=Path))
def diff(run_a: Path, run_b: Path) -> None:
    """Name the first op that differs between two runs of `moe_rt.diagnostics.digest`, of any numbers of ranks.

    The exit status is 1 if they differ.
    """
    try:
        a, b = read(run_a), read(run_b)
    except InvalidConfig as error:
        raise click.ClickException(str(error)) from error
    found = first_difference(a, b)
    if found is not None:
        click.echo(f"first difference: {found}")
        raise SystemExit(1)
    click.echo(f"equal: {len(a.by_rank)} digests, {a.num_ranks} and {b.num_ranks} ranks")
