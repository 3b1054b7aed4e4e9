"""Messages to and from processes of ranks, how such a process begins and ends, and what it may still take."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import select
import signal
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.errors import LimitReached
from moe_rt.lab.testing import channel as channels
from moe_rt.lab.testing import endings, forking, ports, resources
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks

HANG_S = 600.0


def test_messages_keep_their_order_and_length() -> None:
    one, other = Channel.pair()
    for message in (b"", b"x", b"abc\n"):
        one.send(message)
    assert [other.receive() for _ in range(3)] == [b"", b"x", b"abc\n"]
    other.send(b"back")
    assert one.receive(HANG_S) == b"back"
    assert not one.has_news()
    for end in (one, other):
        end.close()


def test_a_message_is_its_length_and_its_bytes() -> None:
    """The length is eight bytes, least first: processes of different versions may be at the ends."""
    end, raw = socket.socketpair()
    channel = Channel(end)
    channel.send(b"abc")
    assert raw.recv(100) == struct.pack("<Q", 3) + b"abc"
    raw.send(struct.pack("<Q", 2) + b"xyz")
    assert (channel.receive(), channel.has_news()) == (b"xy", True)
    raw.close()
    for _ in range(2):
        with pytest.raises(EOFError):
            channel.receive()
    channel.close()
    assert end.fileno() == -1


def test_a_message_that_is_late_or_cut_short() -> None:
    end, raw = socket.socketpair()
    channel = Channel(end)
    with pytest.raises(TimeoutError, match="got 0 of 8 bytes of a message in time"):
        channel.receive(0.0)
    raw.send(struct.pack("<Q", 5) + b"xyz")
    with pytest.raises(TimeoutError, match="got 3 of 5 bytes of a message in time"):
        channel.receive(0.01)
    raw.close()
    assert channel.has_news()
    with pytest.raises(EOFError):
        channel.receive(HANG_S)
    channel.hang_up()
    channel.hang_up()


@pytest.mark.parametrize("length", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_large_messages_come_in_parts(length: int) -> None:
    one, other = Channel.pair()
    message = bytes(range(256)) * (length // 256 + 1)
    sender = threading.Thread(target=one.send, args=(message[:length],))
    sender.start()
    assert other.receive(HANG_S) == message[:length]
    sender.join()


def test_waits_are_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """poll() takes milliseconds, and None for no limit."""
    asked: list[Any] = []
    fake = SimpleNamespace(register=lambda end, events: asked.append(events), poll=lambda limit: asked.append(limit))
    with monkeypatch.context() as patch:
        patch.setattr(select, "poll", lambda: fake)
        one, other = Channel.pair()
        assert one.has_news(0.25) is False
        pool = ProcessRanks()
        pool._channels = {0: one, 1: other}
        assert pool.has_news([0, 1], 0.5) is False
        assert endings.ended_within(3, 2.0) is False
        assert endings.ended_within(3) is False
    assert [each for each in asked if each != select.POLLIN] == [250.0, 500.0, 2000.0, None]
    assert asked.count(select.POLLIN) == 5


def test_a_message_has_one_deadline_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], []

    def has_news(self: Channel, timeout_s: float = 0.0) -> bool:
        waited.append(timeout_s)
        now[0] += 3.0
        return True

    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Channel, "has_news", has_news)
    one, other = Channel.pair()
    one.send(b"a message")
    assert other.receive(5.0) == b"a message"
    assert waited == [5.0, 2.0]
    one.send(b"another")
    assert other.receive(2.0) == b"another"
    assert waited[2:] == [2.0, 0.0], "a limit that has passed is none below zero"


def says_how_it_began(end: Channel, number: int, prefix: str) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    usual = handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]
    end.send(f"{prefix}{number} {usual} {gc.get_freeze_count() > 0}".encode())


def fails(end: Channel) -> None:
    raise ValueError("it fails")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_begins_with_usual_signals_and_ends_with_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    """It prints nothing that this process has printed, and closes the other ends."""
    print("once", end="")
    other, watched = Channel.pair()
    ours, theirs = Channel.pair()
    before = {n: signal.signal(n, signal.SIG_IGN if n == signal.SIGINT else print) for n in (15, 1, 2)}
    try:
        process = forking.fork(says_how_it_began, (7, "rank "), theirs, [ours, other])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    theirs.close()
    assert ours.receive(HANG_S) == b"rank 7 True True"
    assert process.has_ended(HANG_S)
    assert os.waitpid(process.pid, 0)[1] == 0
    process.signal(signal.SIGTERM)  # nothing, as it has ended
    os.close(process.pidfd)
    ours, theirs = Channel.pair()
    failed = forking.fork(fails, (), theirs, [ours])
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive(HANG_S)
    assert os.waitstatus_to_exitcode(os.waitpid(failed.pid, 0)[1]) == 1
    os.close(failed.pidfd)
    out, err = capfd.readouterr()
    assert out == "once"
    assert err.endswith("ValueError: it fails\n")
    watched.close()


def ephemeral(monkeypatch: pytest.MonkeyPatch, directory: Path, first: int, last: int) -> None:
    (directory / "range").write_text(f"{first}\t{last}\n")
    monkeypatch.setattr(ports, "EPHEMERAL", directory / "range")


@pytest.mark.parametrize(
    ("first", "last", "number", "starts"),
    [
        (1026, 65535, 1, {1024, 1025}),
        (1026, 65535, 2, {1024}),
        (1024, 65532, 2, {65533, 65534}),
        (1025, 65534, 1, {1024, 65535}),
        (1026, 65534, 2, {1024}),
        (1025, 65534, 65535 - 1024, {1024, 1025}),  # no range has enough, so all count
    ],
)
def test_ports_are_outside_of_those_that_the_kernel_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: int, last: int, number: int, starts: set[int]
) -> None:
    tried: set[int] = set()

    def note(run: range) -> bool:
        assert len(run) == number
        tried.add(run.start)
        return False

    ephemeral(monkeypatch, tmp_path, first, last)
    monkeypatch.setattr(ports, "_are_free", note)
    with pytest.raises(LimitReached, match=f"TCP ports: got no run of {number} free ones, expected one between 1024 "):
        ports.free_ports(number)
    assert tried == starts
    monkeypatch.setattr(ports, "_are_free", lambda run: run.start == max(starts))
    assert ports.free_ports(number) == max(starts)


def test_a_run_of_ports_is_free_if_all_are() -> None:
    port = ports.free_ports(2) + 1
    with socket.create_server(("", port)):
        assert not ports._are_free(range(port, port + 1))
        assert not ports._are_free(range(port - 1, port + 1))
    assert ports._are_free(range(port, port + 1))
    with socket.create_server(("", port)):
        pass


def test_what_this_process_holds() -> None:
    before = resources.held()
    end, stop = os.open("/dev/null", os.O_RDONLY), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    segment = os.memfd_create("moe_rt_of_a_test")
    os.truncate(segment, 4096)
    mapped = mmap.mmap(segment, 4096)
    now = resources.held()
    # A mapping has a separate descriptor.
    assert {name: now[name] - before[name] for name in now} == {"descriptors": 3, "threads": 1, "segments": 1}
    mapped.close()
    os.close(segment)
    os.close(end)
    stop.set()
    thread.join()
    assert resources.left_of(before) == {"descriptors": 0, "threads": 0, "segments": 0}


def test_counts_may_fall_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts below those before are no reason to wait; counts above them are returned when patience ends."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(resources, "time", clock)
    counts = iter([{"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}, {"a": 9, "b": 9}])
    assert resources.left_of({"a": 1, "b": 2}, lambda: next(counts)) == {"a": 0, "b": -1}
    assert now[0] == pytest.approx(0.02)
    assert resources.left_of({"a": 1}, lambda: {"a": 4}) == {"a": 3}
    assert now[0] == pytest.approx(10.02, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "user", "which", "most"),
    [
        ("descriptors", 0, resource.RLIMIT_NOFILE, None),
        ("threads", 1000, resource.RLIMIT_NPROC, 1),
        ("threads", 0, resource.RLIMIT_AS, (5 << 12) + (3 << 20)),
        ("memory", 1000, resource.RLIMIT_AS, (5 << 12) + (3 << 20)),
    ],
)
def test_limits_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, user: int, which: int, most: int | None
) -> None:
    """The limit before comes back, also after an error."""
    asked: list[Any] = []
    monkeypatch.setattr(resources.os, "geteuid", lambda: user)
    monkeypatch.setattr(resources, "_address_space", lambda: 5 << 12)
    monkeypatch.setattr(resources.resource, "getrlimit", lambda kind: asked.append(kind) or (70, 90))
    monkeypatch.setattr(resources.resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    unused = [fd for fd in range(1000) if not os.path.lexists(f"/proc/self/fd/{fd}")]
    with pytest.raises(KeyError), resources.limited(kind, 3):
        raise KeyError
    assert asked == [which, (which, (unused[3] if most is None else most, 90)), (which, (70, 90))]


@pytest.mark.parametrize("room", [0, 1, 4])
def test_as_many_descriptors_as_there_is_room_for(room: int) -> None:
    with resources.limited("descriptors", room):
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(room)]
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
    for fd in opened:
        os.close(fd)
