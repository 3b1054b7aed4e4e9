"""A reader of a segment returns every field as its owner wrote it, of any rank, kind and channel."""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import Any

import pytest

from moe_rt import _engine

RANKS, DEPTH, RANK = 3, 2, 1
SIZES: dict[str, Any] = dict(
    num_ranks=RANKS, num_experts=41, num_max_tokens=13, hidden=24, num_topk=5, elem_bytes=4, by_token=False,
    alignment=1, num_pushed_tokens=0, num_pushed_rows=0, sums=0, depth=DEPTH,
)  # fmt: skip
MAILBOX = struct.Struct("<Q112xQ")  # signal, two headers, closed
RECORD = "number seq op code tag num_tokens start_ns announced_ns arrived_ns end_ns longest_ns longest_peer handle_seq"
MEMBERS, NODES = [(100 + r, 200 + r) for r in range(RANKS)], [0, 1, 1]


class Segment:
    """A rank's segment, as its engine makes it, and the offsets in its header."""

    def __init__(self, node_of: list[int], rank: int = RANK) -> None:
        shape = _engine.Shape(**SIZES, node_of=node_of)
        self.memory = mmap.mmap(-1, shape.segment_bytes())
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        _engine.write_segment_header(
            segment=address, shape=shape, rank=rank, config_hash=0xABCD, members=MEMBERS, nodes=node_of or [0] * RANKS
        )
        self.header = self.read().header

    def read(self) -> _engine.SegmentReport:
        return _engine.read_segment(self.memory)

    def write(self, offset: int, form: str, *values: Any) -> None:
        struct.pack_into(form, self.memory, offset, *values)


@pytest.fixture
def segment() -> Segment:
    return Segment([])


def test_the_header(segment: Segment) -> None:
    names = ("num_ranks", "num_experts", "num_max_tokens", "hidden", "num_topk", "elem_bytes")
    assert {name: getattr(segment.header, name) for name in names} == {name: SIZES[name] for name in names}
    assert (segment.header.rank, segment.header.config, segment.header.num_nodes) == (RANK, 0xABCD, 1)
    offsets = [getattr(segment.header, name) for name in ("poison", "mailboxes", "members", "op_records", "last_words")]
    mailboxes = DEPTH * 2 * RANKS * MAILBOX.size
    assert offsets == [128, 256, 256 + mailboxes, 384 + mailboxes, 384 + mailboxes + 64 * 128]
    assert segment.read().members == MEMBERS


def test_ops_of_all_channels_are_added_up(segment: Segment) -> None:
    """Mailboxes are of a channel, then a kind, then a rank; a rank that has closed one of them has closed."""
    places = [(channel, kind, rank) for channel in range(DEPTH) for kind in range(2) for rank in range(RANKS)]
    for number, (channel, kind, rank) in enumerate(places):
        closed = int((channel, kind, rank) in ((0, 1, 2), (1, 0, 0)))
        at = segment.header.mailboxes + number * MAILBOX.size
        MAILBOX.pack_into(segment.memory, at, 10 ** (3 * channel) * (1 + 10 * kind + rank), closed)
    report = segment.read()
    assert report.announced == ([1001, 2002, 3003], [11011, 12012, 13013])
    assert report.closed_to == [True, False, True]


def test_the_poison_word(segment: Segment) -> None:
    assert segment.read().poison.code == 0
    dead, poisoned = 20, 22
    segment.write(segment.header.poison, "<Q", (2 + 1) << 32 | (0 + 1) << 16 | dead)
    found = segment.read().poison
    assert (found.code, found.peer, found.got, found.expected) == (poisoned, 0, dead, 2)


def test_records_in_the_order_of_ops(segment: Segment) -> None:
    """Each field is read by its own name; slots may be in any order, and empty ones are no ops."""
    names = RECORD.split()
    for slot, number in enumerate((9, 7)):
        values = [number, *(100 * number + i for i in range(1, len(names)))]
        record = struct.pack("<2Q2iIi5qqQ", *values)
        segment.write(segment.header.op_records + 128 * slot, "<Q88s", 2, record)
    seven, nine = segment.read().op_records
    for found, number in ((seven, 7), (nine, 9)):
        values = [number, *(100 * number + i for i in range(1, len(names)))]
        assert [getattr(found, name) for name in names] == values
    assert segment.read().num_torn == 0


@pytest.mark.parametrize("count", [0, 1, _engine.MOST_LAST_WORDS, _engine.MOST_LAST_WORDS + 1, 2**64 - 1])
def test_last_words_are_as_many_as_were_written(segment: Segment, count: int) -> None:
    text = b"x" * _engine.MOST_LAST_WORDS
    segment.write(segment.header.last_words, f"<Q{len(text)}s", count, text)
    assert segment.read().last_words == text[:count]


@pytest.mark.parametrize(
    ("rank", "clients", "announcers"),
    [(0, [1, 2], ([0, 1, 2], [0, 1, 1])), (1, [0], ([0, 1, 2], [0, 1, 2])), (2, [], ([1, 1, 2], [0, 1, 2]))],
)
def test_nodes_and_who_passes_on(rank: int, clients: list[int], announcers: tuple[list[int], list[int]]) -> None:
    """Rank 0 is the only rank of its node and serves both ranks of the other, where rank 1 serves it."""
    report = Segment(NODES, rank).read()
    assert (report.nodes, report.header.num_nodes, report.clients) == (NODES, 2, clients)
    assert report.announcers == announcers
