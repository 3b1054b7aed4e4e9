"""A report on a group: what each rank does, which ranks it waits for, and which rank to examine first."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from moe_rt import _engine
from moe_rt.errors import MoeRtError

REPORT_DIR = "MOE_RT_REPORT_DIR"
KINDS = ("dispatch", "combine")
SIZES = ("num_experts", "num_max_tokens", "hidden", "num_topk", "elem_bytes")


@dataclass(frozen=True)
class OpRecord:
    """One op of a rank. Times are nanoseconds of CLOCK_MONOTONIC, 0 for what has not happened.

    Attributes:
        number: number of the op on its rank, from 1; the same call on all ranks. `seq` counts only ops of its kind.
        phase: "publish" or "push", "wait", "gather" or "reduce"; "" once the op has ended.
        status: "ok", or a code of errors.py in lower case, once the op has ended; "" before.
        longest_peer: the peer that this rank waited for longest, for `longest_ns`; -1 before the first arrives.
        handle_seq: `seq` of the dispatch whose handle the op uses; 0 for a dispatch, and if the op refused its input.
    """

    number: int
    op: str
    seq: int
    tag: int
    num_tokens: int
    phase: str
    status: str
    start_ns: int
    announced_ns: int
    arrived_ns: int
    end_ns: int
    longest_peer: int
    longest_ns: int
    handle_seq: int

    def __str__(self) -> str:
        return f"{self.op} #{self.seq}"


@dataclass(frozen=True)
class RankReport:
    """One rank, as its own segment and those of its peers show it.

    Attributes:
        node: node of the rank; -1 if no segment can be read.
        serves: remote ranks that it is the proxy of, if rows go in two levels.
        process: "running", "stopped", "dead" or "unknown".
        problem: why its own segment could not be read; "" if it could.
        announced: last sequence number of each kind that it announced to any peer.
        closed: True if it has closed its buffer.
        poison: what its poison word says; "" while the group is healthy.
        last_words: its own reason for leaving the group; "" while it is in the group.
        waits_for: ranks that have not announced the op that it is in or failed in, and proxies that have not passed on
            another rank's announcement.
        state: what it does now, or did last, in words.
        num_torn: number of ops that could not be read because they were being written.
        last_ops: at most 64 ops, the latest last.
    """

    rank: int
    node: int
    serves: list[int]
    pid: int
    process: str
    problem: str
    announced: dict[str, int]
    closed: bool
    poison: str
    last_words: str
    waits_for: list[int]
    state: str
    num_torn: int
    last_ops: list[OpRecord]


@dataclass(frozen=True)
class Disagreement:
    """An op that ranks called differently, though all must call the same.

    Attributes:
        calls: each rank's call, in words.
        outvoted: ranks whose call is not that of the majority; empty without a majority.
    """

    calls: str
    outvoted: list[int]


@dataclass(frozen=True)
class Report:
    """A group at one moment.

    Attributes:
        time_ns: time of the report, in nanoseconds of CLOCK_MONOTONIC.
        config: hash of the buffer's configuration; equal on all ranks.
        sizes: sizes of the buffer, by name.
        stragglers: ranks at which all chains of waits end; only the dead and the closed ones, if any are. Examine these
            first.
        conclusion: a line for each of the first stragglers.
        disagreement: the first op that ranks called differently; None while they agree.
        path: file that `keep` wrote; "" if none.
    """

    time_ns: int
    config: str
    sizes: dict[str, int]
    ranks: list[RankReport]
    stragglers: list[int]
    conclusion: str
    disagreement: Disagreement | None = None
    path: str = ""

    def __str__(self) -> str:
        return self.conclusion + (f"\nthe whole report: {self.path}" if self.path else "")

    def to_json(self) -> str:
        """Return the fields, and those of ranks and ops, by name."""
        return json.dumps(asdict(self), indent=1)


def name_ranks(ranks: list[int]) -> str:
    """Format ranks as "rank 1", or "ranks 0 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def keep(report: Report, rank: int) -> Report:
    """Write the report as JSON to a new file in $MOE_RT_REPORT_DIR, if that is set, which only this user may read.

    Returns the report with the file's path. A failure is only a warning: it must not hide the error to report on.
    """
    directory = os.environ.get(REPORT_DIR)
    if not directory:
        return report
    path = os.path.join(directory, f"moe_rt-rank{rank}-{os.getpid()}-{report.time_ns}.json")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(report.to_json())
    except OSError as error:
        warnings.warn(f"{REPORT_DIR}: could not write the report: {error}", stacklevel=2)
        return report
    return replace(report, path=path)


def last_words(error: BaseException) -> bytes:
    """Return an exception's class and the first line of its message, in UTF-8, cut to the space in a segment."""
    said = ""
    with suppress(Exception):  # a __str__ that raises must not hide the error that it belongs to
        said = str(error.args[0] if isinstance(error, MoeRtError) else error)
    first_line = next(iter(said.strip().splitlines()), "")
    name = type(error).__name__
    return cut(f"{name}: {first_line}" if first_line else name)


def cut(text: str) -> bytes:
    """Encode the text in UTF-8, cut between characters to the space in a segment."""
    return text.encode(errors="replace")[: _engine.MOST_LAST_WORDS].decode(errors="ignore").encode()


def readable(words: bytes) -> str:
    """Return a peer's last words on one line, with blanks for characters that do not print or move the cursor."""
    return "".join(c if c.isprintable() else " " for c in words.decode(errors="replace")).strip()
