"""Heap for CPU ranks on several hosts: memfds as in `shm`, mapped on their own host and reached over UCX from others.

UCX is loaded when the first buffer needs it: from the package libucx-cu13 (the extra `ucx`), or from the system. Ranks
exchange their addresses through the store, as JSON. What arrives is checked before it is used.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_rt import _engine
from moe_rt.errors import CorruptPeer, InvalidConfig, MissingPackage, PeerTimeout
from moe_rt.extras import how_to_install
from moe_rt.group.all_or_none import all_or_none, take_all_or_none
from moe_rt.group.meeting import warn
from moe_rt.group.processes import place
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.memory import shm
from moe_rt.memory.segments import Segments

OLDEST = (1, 13)
AT_EXIT_S = 10.0  # time for peers to read what this rank announced last
_LIBRARY = "libucp.so.0"
# Defaults for UCX, unless the user has set them. A dead link is noticed within about two seconds, or three if nothing
# was under way: then UCX must probe, every 20 seconds by default, and the system's two seconds start with the probe.
# The program keeps its signals: UCX would log more at crashes, and keep it running at SIGHUP, when its terminal closes.
_SETTINGS = {
    "UCX_TCP_USER_TIMEOUT": "2s",
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "2",
    "UCX_KEEPALIVE_INTERVAL": "500ms",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_PLACE = {"where": str, "version": str, "ucx": str}
_REMOTE = {"address": str, "secret": int}  # fields that remote peers need in addition to a segment's record
_MOST_BYTES = 1 << 16  # maximum length of an address
_PAUSE_S = 0.001


def library() -> str:
    """Return UCX's library: the package's if it is installed, else the name that the system's loader looks up.

    Raises:
        MissingPackage: neither exists, or it is no library of UCX.
        InvalidConfig: it is too old.
    """
    spec = importlib.util.find_spec("libucx")
    name = _LIBRARY
    if spec is not None and spec.submodule_search_locations:
        of_package = Path(spec.submodule_search_locations[0]) / "lib" / _LIBRARY
        name = str(of_package) if of_package.is_file() else name
    for setting, value in _SETTINGS.items():  # UCX reads some when it is loaded
        os.environ.setdefault(setting, value)
    try:
        version = _engine.ucx_version(name)
    except RuntimeError as error:
        message = f'heap "ucx": got no library of UCX ({error}), expected one; {how_to_install("ucx")}'
        raise MissingPackage(message) from error
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InvalidConfig(f'heap "ucx": got UCX {version}, expected {oldest} or later; {how_to_install("ucx")}')
    return name


def describe() -> str:
    """Describe the version and the library, or what is missing, for people."""
    try:
        name = library()
        return f"{_engine.ucx_version(name)}, {name}"
    except (MissingPackage, InvalidConfig) as error:
        return str(error)


def allocate(rendezvous: Rendezvous, shape: _engine.Shape, timeout_s: float) -> Segments:
    """Make this rank's segment, map those of its host and connect to all others. Collective: all succeed or raise.

    Raises:
        MissingPackage: some rank has no UCX; its peers raise GroupPoisoned.
        InvalidConfig: versions differ, UCX refuses, or a peer cannot be reached.
        PeerTimeout: a peer answered too late.
        OutOfSharedMemory, SegmentPermission, CorruptPeer: as `shm.allocate`.
    """
    me, num_bytes = rendezvous.rank, shape.segment_bytes()
    opened: list[int] = []
    segments = Segments([], [], [])

    def look() -> dict[str, Any]:
        name = library()
        return {**place(), "version": metadata.version("moe_rt"), "ucx": _engine.ucx_version(name)}

    def make() -> dict[str, Any]:
        record = shm.make_segment(num_bytes, opened, me)
        network = _start(lambda: _engine.UcxNetwork(library=library(), descriptor=opened[0], shape=shape, rank=me))
        segments.network = network
        remote = {"address": base64.b64encode(network.address()).decode(), "secret": network.secret()}
        return {**record, "host": here, "remote": remote}

    def attach() -> None:
        for peer, record in enumerate(records):
            remote = record.pop("remote", None)
            if record.get("host") == here:
                shm.attach_segment(me, peer, record, num_bytes, opened, segments)
                continue
            address, secret = _checked(remote, me, peer)
            segments.add_remote()
            _start(lambda: segments.network.connect(peer=peer, address=address, secret=secret))  # noqa: B023
        _await_connections(rendezvous, segments, timeout_s)

    try:
        places = all_or_none(rendezvous, look, "load UCX", timeout_s)
        here = _agree(places, me)
        neighbours = sum(record["where"] == here for record in places)
        all_or_none(rendezvous, lambda: shm.look_for_room(num_bytes * neighbours, me), "look for memory", timeout_s)
        records = all_or_none(rendezvous, make, "make its segment", timeout_s)
        take_all_or_none(rendezvous, attach, "reach its peers", timeout_s)
    except BaseException:
        segments.release()
        raise
    finally:
        for fd in opened:
            os.close(fd)
    return segments


def await_peers() -> None:
    """Give peers `AT_EXIT_S` to read what this rank announced last. Runs at the end of the program."""
    _engine.await_networks(AT_EXIT_S)


def _start(work: Callable[[], Any]) -> Any:
    """Run `work`. Raise InvalidConfig with UCX's message if UCX refuses."""
    try:
        return work()
    except RuntimeError as error:
        expected = "a network device that UCX can use; UCX_NET_DEVICES and UCX_TLS choose, ucx_info -d shows all"
        raise InvalidConfig(f'heap "ucx": got "{error}", expected {expected}') from error


def _agree(places: list[dict[str, Any]], me: int) -> str:
    """Check that all ranks run the same versions, and return this rank's host."""
    for peer, record in enumerate(places):
        if any(type(record.get(name)) is not kind for name, kind in _PLACE.items()):
            message = f"place of rank {peer}: got the record {record}, expected the fields {list(_PLACE)}"
            raise CorruptPeer(message, rank=me, peer=peer)
        # Compare UCX's first two version numbers: it promises compatibility among releases that share them.
        got = (record["version"], record["ucx"].split(".")[:2])
        expected = (places[me]["version"], places[me]["ucx"].split(".")[:2])
        if got != expected:
            raise InvalidConfig(
                f'heap "ucx": got moe_rt {record["version"]} with UCX {record["ucx"]} on rank {peer}, expected what '
                f"rank {me} has, moe_rt {places[me]['version']} with UCX {places[me]['ucx']}",
                rank=me,
                peer=peer,
            )
    return str(places[me]["where"])


def _checked(remote: Any, me: int, peer: int) -> tuple[bytes, int]:
    """Return the address and the secret of a remote peer. UCX checks the address, but only if it is well-formed."""
    with contextlib.suppress(binascii.Error, ValueError):
        if isinstance(remote, dict) and {name: type(value) for name, value in remote.items()} == _REMOTE:
            address = base64.b64decode(remote["address"], validate=True)
            if 0 < len(remote["address"]) <= _MOST_BYTES and address and 0 <= remote["secret"] < 2**64:
                return address, remote["secret"]
    message = f"address of rank {peer}: got {str(remote)[:80]}, expected the fields {list(_REMOTE)} of a segment"
    raise CorruptPeer(message, rank=me, peer=peer)


def _await_connections(rendezvous: Rendezvous, segments: Segments, timeout_s: float) -> None:
    start, network, has_warned = time.monotonic(), segments.network, False
    for peer in (r for r, address in enumerate(segments.addresses) if not address):
        while not network.flushed(peer):
            rendezvous.raise_first_failure()
            waited = time.monotonic() - start
            if waited * 10 > timeout_s and not has_warned:
                has_warned = True
                warn(rendezvous.rank, waited, [peer], timeout_s)
            if waited > timeout_s:
                message = f"rank {rendezvous.rank} did not reach rank {peer} over UCX within {timeout_s:g} s"
                raise PeerTimeout(f"{message}; {_HINT}", rank=rendezvous.rank, peer=peer)
            time.sleep(_PAUSE_S)
        if network.lost(peer):
            got = f'got "{network.problem(peer)}" from UCX'
            message = f"rank {rendezvous.rank} cannot reach rank {peer}: {got}, expected a network that both share"
            raise InvalidConfig(f"{message}; {_HINT}", rank=rendezvous.rank, peer=peer)


_HINT = "UCX_NET_DEVICES names the interfaces to use, on every host; a firewall must let ranks through on any TCP port"
atexit.register(await_peers)
