"""Makes a report: reads the segments, and finds the ranks that all others wait for.

Peers' memory is read without their help, so that ranks that hang, are stopped or are dead are also reported on. It may
contain anything: it is shown, and only what `read_segment` has checked is used as an index.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_rt import _engine
from moe_rt.diagnostics.report import KINDS, SIZES, Disagreement, OpRecord, RankReport, Report, name_ranks, readable
from moe_rt.errors import Code, Op
from moe_rt.group.processes import Watch, state_letter

MOST_LINES = 4  # maximum lines of a conclusion
MOST_CALLS = 4  # maximum different calls that a disagreement shows
FIRST_KIND = ("dispatch", "combine_backward")  # the ops of KINDS[0]
# Statuses of ops after which a rank goes on.
_GOES_ON = {code.name.lower() for code in Code if code < Code.CONFIG_MISMATCH}
# States by their letter in /proc/<pid>/stat, "" if it cannot be read. All other letters mean "running".
_PROCESS_STATES = {"": "unknown", "T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}


@dataclass(frozen=True)
class _View:
    """State of one rank's process, and its segment or why that cannot be read."""

    pid: int
    process: str
    segment: _engine.SegmentReport | None
    problem: str = ""


def report_on(members: Sequence[tuple[int, int]], mappings: Sequence[Any], watches: Sequence[Watch | None]) -> Report:
    """Report on the ranks whose segments are mapped here.

    Args:
        members: process and inode of each rank, as in Segments.
        mappings: each rank's segment, perhaps read-only; None if it is not mapped.
        watches: the watch of each rank's process, or None.
    """
    found = enumerate(zip(members, mappings, watches, strict=True))
    views = [_look_at(rank, len(members), pid, mapping, watch) for rank, ((pid, _), mapping, watch) in found]
    now = time.monotonic_ns()
    segments = [view.segment for view in views if view.segment is not None]
    ranks = [_rank_report(rank, view, segments, now) for rank, view in enumerate(views)]
    late = stragglers([set(rank.waits_for) for rank in ranks])
    # If a rank is dead or has left, ranks that are merely late are not the cause: they may still arrive.
    late = [rank for rank in late if ranks[rank].closed or ranks[rank].process == "dead"] or late
    header = segments[0].header if segments else None
    return Report(
        time_ns=now,
        config=f"{header.config:#x}" if header else "",
        sizes={name: getattr(header, name) for name in SIZES} if header else {},
        ranks=ranks,
        stragglers=late,
        conclusion=_conclude(ranks, late),
        disagreement=disagreement(ranks),
    )


def stragglers(waits_for: Sequence[set[int]]) -> list[int]:
    """Ranks that are waited for and at which all chains of waits end; all ranks of a cycle may be among them."""
    reached = [_reachable(waits_for, rank) for rank in range(len(waits_for))]
    return [r for r in sorted(set[int]().union(*waits_for)) if all(r in reached[other] for other in reached[r])]


def _look_at(rank: int, num_ranks: int, pid: int, mapping: Any, watch: Watch | None) -> _View:
    if pid == 0:
        return _View(pid, "unknown", None, "on another host")
    process = "dead" if watch is not None and watch.has_ended() else _process_state(pid)
    if mapping is None:
        return _View(pid, process, None, "not mapped here")
    try:
        segment = _engine.read_segment(mapping)
    except ValueError as error:
        return _View(pid, process, None, str(error))
    got = (segment.header.rank, segment.header.num_ranks)
    if got != (rank, num_ranks):
        return _View(pid, process, None, f"rank: got {got[0]} of {got[1]}, expected {rank} of {num_ranks}")
    return _View(pid, process, segment)


def _process_state(pid: int) -> str:
    try:
        return _PROCESS_STATES.get(state_letter(pid), "running")
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:  # the system hides other users' processes
        return "unknown"


def _reachable(waits_for: Sequence[set[int]], start: int) -> set[int]:
    seen: set[int] = set()
    new = waits_for[start]
    while new:
        seen |= new
        new = set[int]().union(*(waits_for[rank] for rank in new)) - seen
    return seen


def _rank_report(rank: int, view: _View, segments: Sequence[_engine.SegmentReport], now: int) -> RankReport:
    own = view.segment
    ops = [] if own is None else [_op_record(op_record) for op_record in own.op_records]
    waits_for = [] if own is None or view.process == "dead" else _missing(own, ops)
    closed = any(s.closed_to[rank] for s in segments)
    return RankReport(
        rank=rank,
        node=segments[0].nodes[rank] if segments else -1,
        serves=[] if own is None else list(own.clients),
        pid=view.pid,
        process=view.process,
        problem=view.problem,
        announced={kind: max((s.announced[k][rank] for s in segments), default=0) for k, kind in enumerate(KINDS)},
        closed=closed,
        poison="" if own is None else _poison(own.poison),
        last_words="" if own is None else readable(own.last_words),
        waits_for=waits_for,
        state=_state(view, closed, waits_for, _current(ops) if ops else None, now),
        num_torn=0 if own is None else own.num_torn,
        last_ops=ops,
    )


def _op_record(f: _engine.OpRecord) -> OpRecord:
    first, last = ("publish", "gather") if _kind(f.op) == 0 else ("push", "reduce")
    phase = "" if f.end_ns else last if f.arrived_ns else "wait" if f.announced_ns else first
    return OpRecord(
        number=f.number,
        op=_name(Op, f.op),
        seq=f.seq,
        tag=f.tag,
        num_tokens=f.num_tokens,
        phase=phase,
        status=_name(Code, f.code) if f.end_ns else "",
        start_ns=f.start_ns,
        announced_ns=f.announced_ns,
        arrived_ns=f.arrived_ns,
        end_ns=f.end_ns,
        longest_peer=f.longest_peer,
        longest_ns=f.longest_ns,
        handle_seq=f.handle_seq,
    )


def _missing(segment: _engine.SegmentReport, ops: Sequence[OpRecord]) -> list[int]:
    """Return the ranks that have not announced the op that this rank waits or failed in, or have not passed it on."""
    if not ops:
        return []
    last = _current(ops)
    waiting = last.announced_ns > 0 and last.arrived_ns == 0
    failed = last.end_ns > 0 and last.status not in _GOES_ON
    kind = int(last.op not in FIRST_KIND)
    announcements = zip(segment.announced[kind], segment.announcers[kind], strict=True)
    return sorted({announcer for seq, announcer in announcements if seq < last.seq}) if waiting or failed else []


def _current(ops: Sequence[OpRecord]) -> OpRecord:
    """Return the op that a rank is or failed in: of several under way the first, which ends first. Else the last."""
    return next((op for op in ops if op.status not in _GOES_ON), ops[-1])


def _kind(op: int) -> int:
    return int(_name(Op, op) not in FIRST_KIND)


def _name(names: type[Op] | type[Code], value: int) -> str:
    return names(value).name.lower() if value in names._value2member_map_ else f"{names.__name__.lower()} {value}"


def _poison(found: _engine.Status) -> str:
    if found.got == Code.OK:
        return ""
    concerned = f", concerning rank {found.expected}" if found.expected >= 0 else ""
    return f"{_name(Code, found.got)}, found by rank {found.peer}{concerned}"


def _state(view: _View, closed: bool, waits_for: list[int], last: OpRecord | None, now: int) -> str:
    parts = [f"is {view.process} (process {view.pid})"] if view.process in ("dead", "stopped") else []
    if closed:
        parts.append("has closed its buffer")
    if view.segment is None:
        parts.append(f"cannot be read ({view.problem})")
    elif last is None:
        parts.append("has begun no op")
    elif last.phase == "wait" and waits_for:
        parts.append(f"has waited in {last} for {name_ranks(waits_for)} for {_seconds(now - last.announced_ns)}")
    elif last.phase:
        parts.append(f"has been in {last} ({last.phase}) for {_seconds(now - last.start_ns)}")
    elif last.status == "ok":
        parts.append(f"last finished {last} {_seconds(now - last.end_ns)} ago")
    else:
        parts.append(f"ended {last} with {last.status} {_seconds(now - last.end_ns)} ago")
    return ", ".join(parts)


def _conclude(ranks: list[RankReport], late: list[int]) -> str:
    lines = []
    for rank in late[:MOST_LINES]:
        waiting = [r for r in ranks if rank in r.waits_for]
        verb = "waits" if len(waiting) == 1 else "wait"
        op = _current(waiting[0].last_ops)
        kind = KINDS[op.op not in FIRST_KIND]
        done = "passed on" if ranks[rank].announced[kind] >= op.seq else "announced"
        wanted = f"{op}, for which {name_ranks([r.rank for r in waiting])} {verb}"
        lines.append(f"rank {rank} has not {done} {wanted}; it {ranks[rank].state}")
    if len(late) > MOST_LINES:
        lines.append(f"and {len(late) - MOST_LINES} more")
    return "\n".join(lines) or "no rank waits for another"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s" if ns >= 1e9 else f"{ns / 1e6:.3g} ms"


def disagreement(ranks: Sequence[RankReport]) -> Disagreement | None:
    """Return the first op that ranks called differently; None if they agree on all ops that they have reached.

    A rank numbers its ops, and a number must be the same call on all ranks.
    """
    calls: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for op in rank.last_ops:
            # A rank that refuses an op may not know the handle it was given.
            if op.handle_seq or op.op == "dispatch":
                calls[op.number][_call(op)].append(rank.rank)
    for _, callers in sorted(calls.items()):
        if len(callers) > 1:
            shown = [f"{name_ranks(who)} called {call}" for call, who in callers.items()]
            more = [f"and {len(shown) - MOST_CALLS} more calls"] if len(shown) > MOST_CALLS else []
            return Disagreement("; ".join(shown[:MOST_CALLS] + more), _outvoted(list(callers.values())))
    return None


def _call(op: OpRecord) -> str:
    handle = f" (handle of dispatch #{op.handle_seq})" if op.handle_seq else ""
    return f"{op} of layer tag {op.tag}{handle}"


def _outvoted(camps: list[list[int]]) -> list[int]:
    largest = max(camps, key=len)
    others = sorted(rank for camp in camps if camp is not largest for rank in camp)
    return others if len(largest) > len(others) else []
