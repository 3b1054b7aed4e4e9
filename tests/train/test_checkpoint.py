"""Resuming is exact on the same number of ranks, works on any number, and refuses torn and foreign checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from train import cases_train as cases

from moe_rt.errors import InvalidConfig, WriteFailed
from moe_rt.train import checkpoint, metrics, train
from moe_rt.train.all_or_none import all_or_none
from moe_rt.train.index import IndexedReader, _record
from moe_rt.train.parallel import process_group

MakeRanks = Callable[[str, int], Ranks]
SHORT = {"steps": 6, "checkpoint_every": 3, "val_every": 3}


@pytest.fixture(scope="module")
def straight(make_ranks: MakeRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps on two ranks without a break."""
    out = tmp_path_factory.mktemp("straight")
    make_ranks("shm", 2).run(cases.run, {**SHORT, "out": out})
    return out


@pytest.fixture
def interrupted(straight: Path, tmp_path: Path) -> Path:
    """Return the same run after a crash in its last step: half a checkpoint, half a line of metrics."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    last = out / "checkpoints" / "step-00000006"
    (last / "manifest.json").unlink()
    shutil.copytree(last, last.with_suffix(".tmp"))
    text = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(text[:-20])
    return out


def rows_without_speed(out: Path) -> list[dict[str, Any]]:
    rows = metrics.read(out / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in rows]


def merged(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: value for state in states for name, value in state.items()}


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_resumes_bit_for_bit(make_ranks: MakeRanks, straight: Path, interrupted: Path) -> None:
    pair = make_ranks("shm", 2)
    pair.run(cases.run, {**SHORT, "out": interrupted, "resume": True})
    assert rows_without_speed(interrupted) == rows_without_speed(straight)
    got, expected = (merged(pair.run(cases.loaded, {"out": out})) for out in (interrupted, straight))
    assert_same(got, expected)
    assert sorted(path.name for path in (interrupted / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


def test_loads_on_any_number_of_ranks(make_ranks: MakeRanks, straight: Path) -> None:
    two = merged(make_ranks("shm", 2).run(cases.loaded, {"out": straight}))
    assert "model.layers.1.moe.experts.5.gate_up_proj" in two
    assert_same(cases.loaded(None, {"out": straight}), two)
    assert_same(merged(make_ranks("shm", 4).run(cases.loaded, {"out": straight, "ep": 4})), two)


def test_keeps_the_bias_of_the_router(make_ranks: MakeRanks, tmp_path: Path) -> None:
    step = float(np.float32(1e-3))
    assert make_ranks("shm", 2).run(cases.reloaded_bias, tmp_path) == [[-step, -step, step, step]] * 2


def test_goes_on_alone(straight: Path, interrupted: Path) -> None:
    train(cases.tiny(**SHORT, out=interrupted, resume=True))
    got, expected = (
        [row["loss"] for row in rows_without_speed(out) if "loss" in row] for out in (interrupted, straight)
    )
    assert got[:3] == expected[:3]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_keeps_the_last_two(tmp_path: Path) -> None:
    train(cases.tiny(out=tmp_path, steps=5, checkpoint_every=1))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]


def test_the_last_step_is_kept_whatever_its_number(tmp_path: Path) -> None:
    train(cases.tiny(out=tmp_path, steps=3, checkpoint_every=2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(("field", "value", "saved"), [("num_experts", 4, 6), ("hidden", 64, 32), ("num_topk", 1, 2)])
def test_refuses_another_model(straight: Path, field: str, value: int, saved: int) -> None:
    config = cases.tiny(**{**SHORT, "out": straight, "resume": True, field: value})
    with pytest.raises(InvalidConfig, match=f"{field}: got {value}, expected {saved} as in the checkpoint"):
        train(config)


def test_does_not_overwrite_a_run(straight: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    with pytest.raises(InvalidConfig, match=r"out: got .* which holds a run"):
        train(cases.tiny(**SHORT, out=straight))
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_resumes_nothing_from_the_start(tmp_path: Path) -> None:
    train(cases.tiny(out=tmp_path, steps=1, resume=True))
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [0, 1, 1]


def test_checkpoints_of_steps_of_any_length_are_found_in_order(tmp_path: Path) -> None:
    names = ["step-00000009", "step-99999999", "step-100000000"]
    for name in (*reversed(names), "step-9", "step-00000010.tmp", "step-00000011.damaged"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint._checkpoints(tmp_path)] == names
    assert [path.name for path in checkpoint._checkpoints(tmp_path, checkpoint.DAMAGED)] == ["step-00000011.damaged"]


def test_files_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that a power cut leaves under its name is whole, and the name itself is on the disk."""
    flushed: set[int] = set()  # inodes: files are also renamed
    not_flushed: list[list[str]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(fd: Any) -> None:
        flushed.add(os.fstat(fd if isinstance(fd, int) else fd.fileno()).st_ino)
        fsync(fd)

    def noted_rename(path: Path, target: Path) -> Path:
        if path.is_dir():
            not_flushed.append([p.name for p in (path, *path.iterdir()) if p.stat().st_ino not in flushed])
            flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    train(cases.tiny(out=tmp_path, steps=1))
    monkeypatch.undo()
    assert not_flushed == [[]]
    assert flushed == {(tmp_path / "checkpoints").stat().st_ino}


def test_an_index_names_every_chunk_of_every_tensor(tmp_path: Path) -> None:
    def chunks(*starts: int) -> list[dict[str, Any]]:
        return [
            {"offsets": [2 * n, 0], "sizes": [2, 3], "file": f"__{n}_0.distcp", "start": start, "bytes": 900 + n}
            for n, start in enumerate(starts)
        ]

    index = {
        "w": {"dtype": "float32", "size": [6, 3], "chunks": chunks(0, 10, 20)},
        "v": {"dtype": "bfloat16", "size": [4, 3], "chunks": chunks(30, 40)},
    }
    metadata = IndexedReader(tmp_path, index).read_metadata()
    assert {
        name: _record(name, tensor, metadata)  # type: ignore[arg-type]
        for name, tensor in metadata.state_dict_metadata.items()
    } == index


def test_a_rank_that_the_system_refuses_is_named() -> None:
    def refused() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    with process_group("cpu", 60.0), pytest.raises(WriteFailed, match='"No space left on device" for a file') as raised:
        all_or_none(refused, WriteFailed, "write")
    assert raised.value.rank == 0
