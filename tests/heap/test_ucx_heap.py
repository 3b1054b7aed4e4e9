"""Heap "ucx" without a network: missing, old, different or corrupt parts raise before anything is allocated."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.cpp_programs import compile_object
from support.routing import make_spec

from moe_rt import Buffer, _engine
from moe_rt.cli import main
from moe_rt.engine.backend import Backend, find_hosts
from moe_rt.errors import CorruptPeer, InvalidConfig, MissingPackage, OutOfSharedMemory
from moe_rt.memory import ucx

HERE = Path(__file__).parent
HANG_S = 600.0
ADDRESS = {"address": "AAAA", "secret": 4096}
NO_ADDRESSES: list[Any] = [
    None,
    {},
    [ADDRESS],
    {**ADDRESS, "more": 1},
    {**ADDRESS, "secret": -1},
    {**ADDRESS, "secret": 2**64},
    {**ADDRESS, "secret": 4096.0},
    {**ADDRESS, "secret": True},
    {**ADDRESS, "address": ""},
    {**ADDRESS, "address": "A"},
    {**ADDRESS, "address": "A" * (1 << 17)},
    {**ADDRESS, "address": "\u00e4AAA"},
    {**ADDRESS, "address": 7},
]


class Told:
    """Rank 0 of two; the other rank's record is rank 0's with some changes."""

    rank, size = 0, 2

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def raise_first_failure(self) -> None:
        pass

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        return [payload, json.dumps({**json.loads(payload), **self._changes})]


def test_interface_is_that_of_the_headers() -> None:
    """The sizes, offsets, flags and functions that moe_rt assumes agree with UCX's headers, as the compiler checks."""
    spec = importlib.util.find_spec("libucx")
    assert spec is not None
    assert spec.submodule_search_locations
    compile_object(HERE / "ucx_interface.cpp", f"-I{spec.submodule_search_locations[0]}/include", "-O0")


@pytest.mark.parametrize("remote", NO_ADDRESSES, ids=str)
def test_addresses_are_checked(remote: Any) -> None:
    with pytest.raises(CorruptPeer, match="address of rank 1: got"):
        ucx._checked(remote, 0, 1)


def test_an_address_is_taken() -> None:
    for secret in (0, 4096, 2**64 - 1):
        assert ucx._checked({**ADDRESS, "secret": secret}, 0, 1) == (b"\0\0\0", secret)


@pytest.mark.parametrize("changes", [{"version": "0.0.1"}, {"ucx": "1.13.1"}])
def test_versions_must_agree(changes: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig, match="on rank 1, expected what rank 0 has") as raised:
        ucx.allocate(Told(**changes), make_spec(2).shape(), 1.0)  # type: ignore[arg-type]
    assert (raised.value.rank, raised.value.peer) == (0, 1)


def test_releases_of_one_version_of_ucx_work_together() -> None:
    ours = {"where": "here", "version": "1.0.0", "ucx": "1.18.0"}
    assert ucx._agree([ours, {**ours, "where": "there", "ucx": "1.18.1"}], 1) == "there"


@pytest.mark.parametrize(("changes", "segments"), [({}, 2), ({"where": "another host"}, 1)])
def test_there_is_room_for_all_segments_of_the_host(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], segments: int
) -> None:
    asked: list[int] = []

    def look_for_room(num_bytes: int, rank: int) -> None:
        asked.append(num_bytes)
        raise OutOfSharedMemory("enough", rank=rank)

    monkeypatch.setattr(ucx.shm, "look_for_room", look_for_room)
    shape = make_spec(2).shape()
    with pytest.raises(OutOfSharedMemory):
        ucx.allocate(Told(**changes), shape, 1.0)  # type: ignore[arg-type]
    assert asked == [segments * shape.segment_bytes()]


@pytest.mark.parametrize("changes", [{"version": 7}, {"ucx": None}, {"where": {}}])
def test_places_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptPeer, match="place of rank 1"):
        ucx.allocate(Told(**changes), make_spec(2).shape(), 1.0)  # type: ignore[arg-type]


def test_a_network_alone() -> None:
    """A peer that was never connected has nothing in flight, and is not lost."""
    fd = os.memfd_create("segment")
    shape = make_spec(2).shape()
    os.ftruncate(fd, shape.segment_bytes())
    network = _engine.UcxNetwork(library=ucx.library(), descriptor=fd, shape=shape, rank=0)
    os.close(fd)
    assert network.flushed(1)
    assert not network.lost(1)
    assert 0 < len(network.address()) <= ucx._MOST_BYTES


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ucx, "_LIBRARY", "libucp_that_is_not_here.so.0")
    with pytest.raises(MissingPackage, match=r"expected one; pip install '\.\[ucx\]'"):
        ucx.library()
    assert "pip install" in ucx.describe()


def test_another_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ucx, "_LIBRARY", "libc.so.6")
    with pytest.raises(MissingPackage, match=r"libc\.so\.6 has no function ucp_get_version"):
        ucx.library()


def test_an_old_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "OLDEST", (9, 0))
    with pytest.raises(InvalidConfig, match=r"got UCX 1\.\d+\.\d+, expected 9.0 or later"):
        ucx.library()


@pytest.mark.parametrize("version", ["1.9.0", "1.12.1", "0.99.0"])
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ucx._engine, "ucx_version", lambda name: version)
    with pytest.raises(InvalidConfig, match=f"got UCX {version}, expected 1.13 or later"):
        ucx.library()
    assert f"got UCX {version}" in ucx.describe()


def test_settings_are_there_when_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its package may also lack the file; then the system's loader looks for it."""
    seen: dict[str, str] = {}
    for name in ucx._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ucx._engine, "ucx_version", lambda name: seen.update(os.environ, loaded=name) or "1.18.0")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(ucx.importlib.util, "find_spec", lambda name: package)
    assert ucx.library() == seen["loaded"] == "libucp.so.0"
    assert {name: seen.get(name) for name in ucx._SETTINGS} == ucx._SETTINGS


def test_a_dead_link_is_noticed_as_soon_as_documented() -> None:
    def seconds(setting: str) -> float:
        value = ucx._SETTINGS[setting]
        return float(value[:-2]) / 1000 if value.endswith("ms") else float(value.removesuffix("s"))

    idle, interval = seconds("UCX_TCP_KEEPIDLE"), seconds("UCX_TCP_KEEPINTVL")
    assert seconds("UCX_TCP_USER_TIMEOUT") <= 2.0
    assert idle + interval * int(ucx._SETTINGS["UCX_TCP_KEEPCNT"]) <= 3.0
    assert seconds("UCX_KEEPALIVE_INTERVAL") + seconds("UCX_TCP_USER_TIMEOUT") <= 3.0
    table = (Path(__file__).parents[2] / "docs/howto/cluster.md").read_text()
    assert (
        "`UCX_KEEPALIVE_INTERVAL` | 2s, 1s, 1s, 2, 500ms unless set: a lost link is `PeerDead` after 2 to 3 s" in table
    )


def test_the_oldest_version_is_the_documented_one() -> None:
    document = Path(__file__).parents[2] / "docs" / "heap.md"
    assert f"versions from {'.'.join(map(str, ucx.OLDEST))} on" in document.read_text()


def test_the_oldest_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _engine.ucx_version(ucx.library())
    monkeypatch.setattr(ucx, "OLDEST", tuple(map(int, found.split(".")[:2])))
    assert _engine.ucx_version(ucx.library()) == found


def test_settings_of_the_user_stay() -> None:
    code = "import os; os.environ['UCX_TCP_USER_TIMEOUT'] = '7s'; from moe_rt.memory import ucx; ucx.library()\n"
    code += "print(*map(os.environ.get, ('UCX_TCP_USER_TIMEOUT', 'UCX_TCP_KEEPCNT', 'UCX_KEEPALIVE_INTERVAL')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "7s 2 500ms\n"


@pytest.mark.parametrize(("asked", "changes"), [(None, set()), ("SIGUSR2", {signal.SIGUSR2})])
def test_signals_and_limits_of_the_program_stay(asked: str | None, changes: set[int]) -> None:
    """Signals and limits are as before UCX was loaded and opened a network, except for a signal that the user
    requests."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)} | ({"UCX_DEBUG_SIGNO": asked} if asked else {})
    words = [sys.executable, HERE / "ucx_signals_job.py"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    assert set(json.loads(done.stdout)) == changes, done.stdout


def test_a_rank_ends_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """A rank whose terminal closes ends, and its peer raises PeerDead."""
    words = ["env", "--default-signal=HUP", sys.executable, HERE / "closed_terminal_job.py", tmp_path / "store"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == f"PeerDead, {-signal.SIGHUP}\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("asked", "other", "expected"),
    [
        ("auto", {}, "shm"),
        ("auto", {"where": "elsewhere"}, "ucx"),
        ("auto", {"where": "unknown 1"}, "shm"),
        ("shm", {"where": "elsewhere", "heap": "auto"}, "shm"),
        ("auto", {"heap": "ucx"}, "ucx"),
    ],
)
def test_the_heap_of_a_group(asked: str, other: dict[str, str], expected: str) -> None:
    backend = Backend("shm", None, anywhere=asked == "auto")
    assert find_hosts(backend, Told(**other), make_spec(2), 1.0).heap == expected  # type: ignore[arg-type]


def test_different_heaps_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"heap: got \['shm', 'ucx'\] on different ranks"):
        find_hosts(Backend("ucx", None), Told(heap="shm"), make_spec(2), 1.0)  # type: ignore[arg-type]


def test_a_group_of_one_host(make_ranks: Any) -> None:
    """A group of one host maps all segments, and its ops are those of heap "shm"."""
    assert make_ranks("shm", 2).run(one_host) == ["ucx"] * 2


def one_host(group: Any) -> str:
    sizes = dict(num_max_tokens_per_rank=4, hidden=16, num_topk=1, num_experts=4, dtype=torch.float32)
    with Buffer(group, heap="ucx", **sizes) as buffer:
        x = torch.ones(3, 16)
        recv_x, recv_weights, handle = buffer.dispatch(x, torch.tensor([[0], [3], [2]]), torch.ones(3, 1))
        assert torch.equal(buffer.combine(recv_x, recv_weights, handle), x)
    return buffer.heap


def test_info_tells() -> None:
    text = CliRunner().invoke(main, ["info"]).output
    assert "or ucx on several hosts" in text
    assert f"UCX          {_engine.ucx_version(ucx.library())}, {ucx.library()}" in text
