"""Reading a segment of any content ends in a report or in a stated reason, never in a crash."""

from __future__ import annotations

import io
import json
import mmap
import os
import struct
from typing import Any

import pytest
from diagnostics.cases_diagnostics import healthy_segment
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moe_rt import _engine
from moe_rt.diagnostics.collect import report_on
from moe_rt.diagnostics.report import Report
from moe_rt.diagnostics.show import show_report

SEGMENT_HEADER_BYTES, SLOT_BYTES, MAILBOX_BYTES, WORDS_BYTES = 112, 128, 128, 512
OFFSETS = {
    "config": 48,
    "poison": 56,
    "mailboxes": 64,
    "members": 72,
    "op_records": 80,
    "bytes": 88,
    "last words": 96,
    "nodes": 104,
}  # offsets in SegmentHeader
NASTY = [-(2**63), -1, 0, 1, 8, 128, 2**31 - 1, 2**31, 2**47, 2**63 - 128, 2**63 - 1]


HEALTHY = healthy_segment()


def mapped(content: bytes) -> mmap.mmap:
    mapping = mmap.mmap(-1, len(content))
    mapping[:] = content
    return mapping


def patched(at: int, content: bytes) -> mmap.mmap:
    mapping = mapped(HEALTHY)
    mapping[at : at + len(content)] = content
    return mapping


def report(mapping: Any) -> Report:
    """Return a report on this one segment, after it was shown in every format."""
    made = report_on([(os.getpid(), 0)], [mapping], [None])
    assert json.loads(made.to_json())["ranks"][0]["rank"] == 0
    Console(file=io.StringIO()).print(show_report(made))
    return made


def header_field(name: str) -> int:
    return struct.unpack_from("<q", HEALTHY, OFFSETS[name])[0]


END = header_field("last words") + WORDS_BYTES  # end of the control region


def test_healthy_segment_is_read() -> None:
    made = report(mapped(HEALTHY))
    assert made.ranks[0].problem == ""
    assert len(made.ranks[0].last_ops) == 6
    assert header_field("bytes") == len(HEALTHY)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=SEGMENT_HEADER_BYTES, max_size=4096), st.booleans())
def test_random_segment_header(content: bytes, keep_magic: bool) -> None:
    start = HEALTHY[:12] if keep_magic else b""  # magic and version
    report(patched(len(start), content))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*OFFSETS]),
    st.sampled_from(NASTY) | st.integers(-(2**63), 2**63 - 1) | st.integers(-4096, len(HEALTHY) + 4096),
)
def test_offsets_that_lead_outside(name: str, value: int) -> None:
    made = report(patched(OFFSETS[name], struct.pack("<q", value)))
    sizes = {"poison": 8, "mailboxes": 2 * MAILBOX_BYTES, "members": 16, "op_records": 64 * SLOT_BYTES}
    sizes["last words"] = WORDS_BYTES
    if name in sizes and not (0 <= value <= len(HEALTHY) - sizes[name] and value % 128 == 0):
        assert made.ranks[0].problem.startswith(f"{name}: got {value}, expected a line")


@pytest.mark.parametrize("num_ranks", [-1, 0, 2**15 - 1, 2**15, 2**31 - 1])
def test_ranks_that_do_not_fit(num_ranks: int) -> None:
    made = report(patched(20, struct.pack("<i", num_ranks)))
    assert made.ranks[0].problem.startswith(("ranks: got", "members: got"))


@settings(max_examples=200, deadline=None)
@given(st.integers(SEGMENT_HEADER_BYTES, END), st.binary(min_size=1, max_size=1024))
def test_random_bytes_after_the_segment_header(at: int, content: bytes) -> None:
    made = report(patched(at, content))
    assert made.ranks[0].problem == ""
    assert made.stragglers in ([], [0])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(HEALTHY)) | st.integers(END - SLOT_BYTES, END))
def test_cut_segment(length: int) -> None:
    made = report(mapped(HEALTHY[:length]) if length else b"")
    assert (made.ranks[0].problem == "") == (length >= END)


def test_torn_op_record_is_reported() -> None:
    """A record with an odd stamp, left by a rank that was killed while it wrote, is counted as torn."""
    last = header_field("op_records") + 6 * SLOT_BYTES
    made = report(patched(last, struct.pack("<Q", 7)))
    assert made.ranks[0].num_torn == 1
    assert [op.seq for op in made.ranks[0].last_ops] == [1, 1, 2, 2, 3]


def test_unaligned_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="start: got"):
        _engine.read_segment(memoryview(mapped(HEALTHY))[8:])


def test_peer_that_overwrote_its_segment_header() -> None:
    """A peer that overwrote its segment header does not change the report on the others."""
    mappings = [mapped(HEALTHY), patched(0, b"x" * SEGMENT_HEADER_BYTES)]
    made = report_on([(os.getpid(), 0)] * 2, [None, mappings[1]], [None, None])
    assert made.ranks[0].problem == "not mapped here"
    assert made.ranks[1].problem.startswith("magic: got")
    assert made.ranks[1].state.startswith("cannot be read (magic: got")
    assert report(mappings[0]).ranks[0].problem == ""
