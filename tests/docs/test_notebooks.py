"""Every notebook of the documents runs and prints its stored outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.forked_python import run_python

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
# Run the cells in order, in one scope, as a kernel does, and print the output of each.
RUN = """
import contextlib, io, json, sys
scope, said = {"__name__": "__main__"}, []
for number, text in enumerate(json.load(open(sys.argv[1]))):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(text, f"<cell {number}>", "exec"), scope)
    said.append(output.getvalue())
print(json.dumps(said))
"""


def text_of(lines: list[str]) -> str:
    return "".join(lines)


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path) -> None:
    code = cells(path)
    (tmp_path / "cells.json").write_text(json.dumps([text_of(cell["source"]) for cell in code]))
    done = run_python("-c", RUN, tmp_path / "cells.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = ["".join(text_of(output["text"]) for output in cell["outputs"]) for cell in code]
    assert json.loads(done.stdout) == stored, "run it anew and save it"


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["protocol.ipynb"]
