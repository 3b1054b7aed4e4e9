"""A writer of the rendezvous store can inject data but no code, and cannot lead a rank to a file that is not a
segment."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS
from faults.cases_faults import good_round, open_buffer
from support.routing import make_spec

from moe_rt.errors import ConfigMismatch, CorruptPeer, GroupPoisoned, InvalidConfig, PeerTimeout, SegmentPermission
from moe_rt.group.all_or_none import agree
from moe_rt.group.meeting import Meeting
from moe_rt.group.processes import place
from moe_rt.group.rendezvous import Rendezvous, all_gather_records
from moe_rt.memory import shm

NO_RECORDS = ["", "{", "[1]", "null", "7", '"text"', "[" * 10**5, "\x80\x04K\x01.", "NaN", "\ud800"]
NUM_BYTES = 4096


class Scripted:
    """Rank 0 of two; `peer(own)` returns rank 1's entry in the store in each round. Records what rank 0 sent."""

    rank, size = 0, 2

    def __init__(self, *peer: Any) -> None:
        self._peer, self.sent = iter(peer), []

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def raise_first_failure(self) -> None:
        pass

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        self.sent.append(payload)
        return [payload, next(self._peer)(payload)]


def honest(own: str) -> str:
    return own


def changed(**fields: Any) -> Any:
    return lambda own: json.dumps({**json.loads(own), **fields})


@pytest.mark.parametrize("payload", NO_RECORDS, ids=lambda p: repr(p[:10]))
def test_what_is_no_record_is_refused(payload: str) -> None:
    with pytest.raises(CorruptPeer, match=r"rank 1: got .*, expected a JSON object"):
        all_gather_records(Scripted(lambda own: payload), {"own": 1}, 1.0)


def test_bytes_that_are_no_text_are_refused() -> None:
    store = torch.distributed.HashStore()
    peer = Meeting(store, 1, 2)
    with Rendezvous(store, 0, 2) as rendezvous:
        peer._find_name("")
        store.set(peer._keys(0)[1], b"\xff\xfe{}")
        with pytest.raises(CorruptPeer, match="rank 1"):
            all_gather_records(rendezvous, {}, 1.0)


@pytest.mark.parametrize("text", [*NO_RECORDS, '{"where": 3, "pid": 4}', '{"pid": 1}'], ids=lambda p: repr(p[:10]))
def test_a_place_that_is_none_is_nobody_to_watch(text: str) -> None:
    store = torch.distributed.HashStore()
    store.set("moe_rt/places/1", text.encode(errors="surrogatepass"))
    with pytest.raises(PeerTimeout, match=r"ranks \[1\] did not come"):
        all_gather_records(Rendezvous(store, 0, 2), {}, 0.1)


@pytest.mark.parametrize("pid", ["1", -1, 0, 2**64, True, None, [7]], ids=str)
def test_the_process_of_a_place_is_a_number(pid: Any) -> None:
    store = torch.distributed.HashStore()
    store.set("moe_rt/places/1", json.dumps({**place(), "pid": pid}))
    with pytest.raises(PeerTimeout, match=r"ranks \[1\] did not come"):
        all_gather_records(Rendezvous(store, 0, 2), {}, 0.1)


FIELDS = (
    *("topology", "placement", "num_max_tokens_per_rank", "hidden", "num_topk", "num_experts", "dtype", "version"),
    *("capacity_factor", "overflow", "dispatch_dtype", "combine_dtype", "layout", "expert_alignment", "route"),
    *("sums", "depth"),
    *("tuning.pushed_tokens", "tuning.pushed_rows", "tuning.pushed_bytes", "tuning.network_threads"),
)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_the_configuration_is_compared(field: str) -> None:
    with pytest.raises(ConfigMismatch, match=f"^{field}: got other on rank 1"):
        agree(Scripted(changed(**{field: "other"})), make_spec(2).record(), 1.0, "agree")


def test_no_field_of_the_configuration_is_new() -> None:
    assert sorted(make_spec(2).record()) == sorted(FIELDS), "and compared above"


def test_ranks_on_another_host_are_distinguished() -> None:
    with pytest.raises(InvalidConfig, match="got rank 1 on another host than rank 0, expected one host"):
        shm.allocate(Scripted(honest, changed(host="x"), honest), NUM_BYTES, 1.0)


def test_a_configuration_without_fields_is_a_mismatch() -> None:
    with pytest.raises(ConfigMismatch, match="on rank 1"):
        agree(Scripted(lambda own: "{}"), make_spec(2).record(), 1.0, "agree")


def test_an_honest_segment_is_mapped() -> None:
    shm.allocate(Scripted(honest, honest, honest), NUM_BYTES, 1.0).release()


@pytest.mark.parametrize(
    "fields",
    [{"pid": "../tmp"}, {"fd": "0/../../environ"}, {"pid": None}, {"fd": 1.5}, {"pid": True}, {"host": 3}, {"more": 1}],
    ids=str,
)
def test_fields_of_a_segment_are_checked_before_a_path_is_made_of_them(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptPeer, match="got the record"):
        shm.allocate(Scripted(honest, changed(**fields), honest), NUM_BYTES, 1.0)


@pytest.mark.parametrize("fields", [{"ino": 1}, {"dev": 999}, {"fd": 10**6}, {"pid": 2**31 - 1}, {"pid": -1}], ids=str)
def test_another_descriptor_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SegmentPermission, match="segment of rank 1"):
        shm.allocate(Scripted(honest, changed(**fields), honest), NUM_BYTES, 1.0)


def test_a_segment_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's segment is refused, even if root could open it. Here this rank claims to be another user."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SegmentPermission, match=f"segment of rank 0: got .*, {os.getuid()}, .*, expected "):
        shm.allocate(Scripted(honest, honest, honest), NUM_BYTES, 1.0)


def test_a_file_that_could_shrink_is_refused(tmp_path: Path) -> None:
    """A user's file of the right size is refused, even if correctly described: truncating it would kill ranks with
    SIGBUS."""
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_BYTES))
    with path.open("r+b") as file:
        stat = os.fstat(file.fileno())
        fields = {"fd": file.fileno(), "dev": stat.st_dev, "ino": stat.st_ino}
        with pytest.raises(SegmentPermission, match="seals"):
            shm.allocate(Scripted(honest, changed(**fields), honest), NUM_BYTES, 1.0)
    assert path.read_bytes() == bytes(NUM_BYTES)


@pytest.mark.parametrize(
    "text",
    [*NO_RECORDS, '{"error": "SystemExit"}', '{"rank": 1, "error": "SystemExit"}', '{"rank": 1, "error": ["x"]}'],
)
def test_a_failure_that_a_peer_made_up_is_an_error(text: str) -> None:
    store = torch.distributed.HashStore()
    peer = Meeting(store, 1, 2)
    with Rendezvous(store, 0, 2) as rendezvous:
        peer._find_name("{}")
        rendezvous.all_gather("{}", 1.0)
        store.set(peer._keys(1)[0].rpartition("/")[0], text.encode(errors="surrogatepass"))
        with pytest.raises((CorruptPeer, GroupPoisoned)):
            shm.allocate(rendezvous, NUM_BYTES, 1.0)


@pytest.mark.parametrize("failure", [7, {}, {"id": 1}, {"came": ["", ""]}], ids=str)
def test_a_failure_at_a_place_that_is_none_concerns_nobody(failure: Any) -> None:
    store = torch.distributed.HashStore()
    here = {**place(), "ticket": "", "since": time.time()}
    store.set("moe_rt/places/1", json.dumps({**here, "failures": [failure]}))
    with pytest.raises(PeerTimeout, match=r"ranks \[1\] did not come"):
        all_gather_records(Rendezvous(store, 0, 2), {}, 0.1)


def test_payloads_are_json() -> None:
    rendezvous = Scripted(honest, honest, honest, honest)
    agree(rendezvous, make_spec(2).record(), 1.0, "agree")
    shm.allocate(rendezvous, NUM_BYTES, 1.0).release()
    assert [type(json.loads(payload)) for payload in rendezvous.sent] == [dict] * 4


# Saved once: ranks that are threads patch one module together, and each must restore the originals.
PICKLE = {name: getattr(pickle, name) for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")}


def without_pickle(group: Any) -> None:
    """Make and use a buffer while every way to pickle is broken on this rank."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickled")

    try:
        for name in PICKLE:
            setattr(pickle, name, refuse)
        with open_buffer(group) as buffer:
            good_round(buffer)
    finally:
        for name, function in PICKLE.items():
            setattr(pickle, name, function)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_no_bootstrap_pickles(make_ranks: Any, heap: str) -> None:
    make_ranks(heap, 2).run(without_pickle)
