"""A replay takes recorded layers by name or number and tokens by rank; a file that fails leaves nothing."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rt.errors import InvalidConfig, WriteFailed
from moe_rt.routes import ops, session
from moe_rt.routes.file import Routes, load, merge


def made(rank: list[int], micro_batch: list[int], num_micro_batches: int, num_ranks: int = 1) -> Routes:
    """Return the routes of these tokens in one layer; token t visits expert t."""
    where = (torch.tensor(given, dtype=torch.int32) for given in (rank, micro_batch))
    ids = torch.arange(len(rank), dtype=torch.int16).view(-1, 1, 1)
    return Routes(ids, 16, ("moe",), num_ranks, num_micro_batches, *where)


@pytest.mark.parametrize(
    ("recorded", "layers", "expected"),
    [
        (["a", "b", "c"], ["c", "a"], [2, 0]),
        (["x.0", "x.5"], ["y.3", "y.4"], [0, 1]),
        (["0", "1", "2", "3"], ["model.layers.3.moe", "model.layers.1.moe"], [3, 1]),
    ],
    ids=["equal names", "as many", "numbers"],
)
def test_recorded_layers_of_a_model(recorded: list[str], layers: list[str], expected: list[int]) -> None:
    assert session.columns(recorded, layers) == expected


@pytest.mark.parametrize("layers", [["moe.1", "other.1"], ["moe.4"], ["moe"]], ids=str)
def test_layers_that_were_not_recorded(layers: list[str]) -> None:
    with pytest.raises(InvalidConfig, match="routes: layers: got"):
        session.columns(["0", "1", "2"], layers)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_another_number_share_each_micro_batch(rank: int) -> None:
    """A micro-batch may be empty, also the last one."""
    shares = session._shares(made([0] * 6, [0, 0, 2, 2, 2, 2], 4), rank, 2, None)
    assert [share.flatten().tolist() for share in shares] == [[rank], [], [2 + 2 * rank, 3 + 2 * rank], []]


def test_tokens_of_several_ranks_follow_each_other_in_a_micro_batch() -> None:
    """Tokens are in the order micro-batch, rank, place, whatever their order in the file."""
    source = made([1, 0, 1, 0], [0, 0, 1, 1], 2, num_ranks=2)
    (first, second) = session._shares(source, 0, 1, None)
    assert (first.flatten().tolist(), second.flatten().tolist()) == ([1, 0], [3, 2])


def test_parts_may_come_in_any_order() -> None:
    """Merged tokens are in the order micro-batch, rank, place."""
    parts = [replace(made([rank] * 2, [0, 1], 2, num_ranks=3), of_rank=rank) for rank in (2, 0, 1)]
    whole = merge(parts)
    assert whole.rank.tolist() == [0, 1, 2] * 2
    assert whole.micro_batch.tolist() == [0] * 3 + [1] * 3
    assert (whole.of_rank, whole.num_ranks) == (None, 3)


def test_ranks_compare_experts_and_places() -> None:
    source = made([0, 1], [0, 1], 2, num_ranks=2)
    others = [{name: 1 - getattr(source, name)} for name in ("topk_idx", "rank", "micro_batch")]
    sums = [session._checksum(replace(source, **changes)) for changes in ({}, *others)]
    assert len(set(sums)) == 4


def test_a_full_disk_leaves_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fill(file: Any, **arrays: Any) -> None:
        file.write(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", fill)
    (tmp_path / "routes.npz").write_bytes(b"an older file")
    with pytest.raises(WriteFailed, match="No space left on device"):
        made([0], [0], 1).save(tmp_path / "routes.npz")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("routes.npz", b"an older file")]


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match=r"routes .*none/a.npz: got No such file or directory, expected to write"):
        made([0], [0], 1).save(tmp_path / "none/a.npz")


@pytest.mark.parametrize(
    ("name", "wrong"), [("rank", -1), ("rank", 2), ("micro_batch", -1), ("micro_batch", 3)], ids=str
)
def test_a_number_out_of_range_in_a_file(tmp_path: Path, name: str, wrong: int) -> None:
    """Its error says which number and which are expected; the largest ones are fine."""
    whole = made([0, 1], [0, 2], 3, num_ranks=2)
    whole.save(tmp_path / "a.npz")
    assert getattr(load(tmp_path / "a.npz"), name).tolist() == getattr(whole, name).tolist()
    replace(whole, **{name: torch.tensor([wrong, 0], dtype=torch.int32)}).save(tmp_path / "a.npz")
    most = {"rank": 1, "micro_batch": 2}[name]
    with pytest.raises(InvalidConfig, match=f"a.npz: {name}: got a number out of range, expected 0 to {most} "):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize("rank", [None, 0])
def test_a_part_of_a_ranks_own_routes_is_its_own(num_ranks: int, micro_batch: int | None, rank: int | None) -> None:
    own = replace(made([0] * 3, [0, 1, 1], 2, num_ranks), of_rank=None if num_ranks == 1 else 0)
    part = own.of(rank=rank, micro_batch=micro_batch)
    assert part.of_rank == own.of_rank
    assert len(part.rank) == (3 if micro_batch is None else 2)
    merged = replace(own, of_rank=None).of(rank=rank)
    assert merged.of_rank == (None if num_ranks == 1 else rank), "the part of a rank is its own"


@pytest.mark.parametrize("part", [ops._note, ops._recorded])
def test_routes_of_a_graph_that_is_captured(monkeypatch: pytest.MonkeyPatch, part: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ids: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(InvalidConfig, match="got a CUDA graph that is being captured"):
        part(ids, ids, 0)
