"""Ports for programs under test are free, consecutive, and outside the kernel's range for connections."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_rt.errors import LimitReached
from moe_rt.lab.testing import ports

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [1, 10])
def test_they_are_outside_the_ephemeral_range(number: int) -> None:
    first, last = (int(word) for word in ports.EPHEMERAL.read_text().split())
    for _ in range(20):
        start = ports.free_ports(number)
        assert ports.LOWEST <= start <= ports.HIGHEST - number + 1
        assert start + number <= first or start > last


def test_all_of_them_can_be_bound() -> None:
    start = ports.free_ports(10)
    with ExitStack() as sockets:
        for port in range(start, start + 10):
            sockets.enter_context(socket.create_server(("127.0.0.1", port)))


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> None:
    """A run of free ports avoids a port in use: here the only run without it is above it."""
    start = ports.free_ports(5)
    monkeypatch.setattr(ports, "LOWEST", start)
    monkeypatch.setattr(ports, "HIGHEST", start + 4)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    ports.EPHEMERAL.write_text(f"1\t{start - 1}\n")
    with socket.create_server((address, start + 1)):
        assert ports.free_ports(3) == start + 2
        with pytest.raises(LimitReached, match=rf"got no run of 4 free ones, expected one between {start} and"):
            ports.free_ports(4)


def test_all_ports_are_looked_at_where_the_kernel_has_them_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    ports.EPHEMERAL.write_text("1024\t65535\n")
    assert ports.LOWEST <= ports.free_ports(10) <= ports.HIGHEST


def test_a_range_of_just_enough_ports_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = ports.free_ports(7)
    monkeypatch.setattr(ports, "LOWEST", start)
    monkeypatch.setattr(ports, "HIGHEST", start + 6)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    ports.EPHEMERAL.write_text(f"{start + 3}\t65535\n")
    assert {ports.free_ports(3) for _ in range(20)} == {start}


def test_no_program_takes_the_port_of_a_closed_socket() -> None:
    """No program reads a port number from a socket, closes it, and then uses the number: anyone may get that port."""
    found = [
        str(path.relative_to(ROOT))
        for folder in ("moe_rt", "examples", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"bind\(\([^)]*, 0\)\)|create_server\(\([^)]*, 0\)\) as \w+:\s+port =", path.read_text())
    ]
    assert found == []
