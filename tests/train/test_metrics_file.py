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


def test_a_line_that_is_left_out_is_shown_up_to_forty_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 39 + b"\n" + b"y" * 40 + b"\n" + b"z" * 41 + b"\n")
    assert metrics.read(path) == []
    shown = [repr("x" * 39 + "\n"), repr("y" * 40), repr("z" * 40)]
    assert capsys.readouterr().out == "".join(
        f"{path}, line {number}: got {text}, expected a JSON object with a step; it is left out\n"
        for number, text in enumerate(shown, 1)
    )
    assert metrics.read(tmp_path / "none") == []


def test_a_validation_is_printed_above_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is in the file as soon as it was reported, and a resumed run keeps those up to its step."""
    path = tmp_path / "a/run/metrics.jsonl"
    with metrics.Reporter(path, first_step=0, steps=3) as reporter:
        reporter.training({"step": 1, "loss": 2.5})
        reporter.validation({"step": 1, "val_bpb": 7.9996})
        assert metrics.read(path) == [{"step": 1, "loss": 2.5}, {"step": 1, "val_bpb": 7.9996}]
        reporter.training({"step": 2, "loss": 2.0})
    assert "step      1  validation 8.000 bits per byte\n" in capsys.readouterr().out
    with metrics.Reporter(path, first_step=1, steps=3):
        assert [row["step"] for row in metrics.read(path)] == [1, 1]
    assert [each.name for each in path.parent.iterdir()] == ["metrics.jsonl"]


def test_numbers_beside_the_bar() -> None:
    row = {"step": 3, "tokens_per_s": 1234567.4, "val_bpb": 7.0006, "lr": 1.0, "loss": 0.12345}
    assert metrics.latest_numbers(row) == "loss 0.123  val 7.001 bits/byte  1,234,567 bytes/s"
    assert metrics.latest_numbers({"step": 3, "val_bpb": 7.0}) == "val 7.000 bits/byte"
    assert metrics.latest_numbers({}) == ""
