"""metrics.jsonl after crashes: invalid lines are dropped and reported, and a run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_rt.train import metrics

ROWS = [{"step": 0, "val_loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
TORN = [b"\n", b'{"step": 1, "lo\n', b"\x00\x00\x00\n", b"\xff\xfe{}\n", b"[1]\n", b"{}\n", b'{"step": "1"}\n']


def written(path: Path, line: bytes) -> Path:
    """Return the file, which has the line between the first row and the others."""
    rows = [json.dumps(row).encode() + b"\n" for row in ROWS]
    path.write_bytes(b"".join([rows[0], line, *rows[1:]]))
    return path


@pytest.mark.parametrize("line", TORN, ids=repr)
def test_a_line_in_the_middle_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    path = written(tmp_path / "metrics.jsonl", line)
    assert metrics.read(path) == ROWS
    assert capsys.readouterr().out.startswith(f"{path}, line 2: got ")


@pytest.mark.parametrize("line", [b'{"step": 3, "lo', b"\xff", b'{"step": 3}'], ids=repr)
def test_a_last_line_that_was_cut_short_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS) + line)
    assert metrics.read(path) == ROWS
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("line", TORN, ids=repr)
def test_a_run_goes_on_and_mends_the_file(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path / "metrics.jsonl", line)
    with metrics.Reporter(path, first_step=1, steps=3) as reporter:
        reporter.training({"step": 2, "loss": 0.5})
    expected = [*ROWS[:2], {"step": 2, "loss": 0.5}]
    assert [json.loads(text) for text in path.read_text().splitlines()] == expected


def test_a_run_that_starts_again_keeps_no_row_and_hides_none(tmp_path: Path) -> None:
    """A run that is resumed without a checkpoint starts from step 0; who follows the file sees each row."""
    path = written(tmp_path / "metrics.jsonl", b"")
    with metrics.Reporter(path, first_step=0, steps=3) as reporter:
        assert metrics.read(path) == []
        reporter.validation({"step": 0, "val_loss": 4.0, "val_bpb": 6.0})
        assert metrics.read(path) == [{"step": 0, "val_loss": 4.0, "val_bpb": 6.0}]
