"""Bounds on what peers list: each is tested one step inside and outside, and no check can be taken out unnoticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from compiled import ROOT, compile_program

HERE = Path(__file__).parent
CHECKED = {
    "cuda/protocol/flat/index.h": "plausible",
    "cuda/protocol/flat/dispatch.h": "gather_token",
    "cuda/device/rdma.h": "fetch_entries",
}


def test_every_bound() -> None:
    program = compile_program(HERE / "bounds.cpp", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def clauses(text: str, function: str) -> list[str]:
    """The conditions under which a function refuses, one by one."""
    begin = text.index(f" {function}(")
    body = text[begin : text.index("\n}\n", begin)]
    refusals = re.findall(r"if \(([^;{}]*?)\)\s*\{?\s*(?:return false|return|out_of_range = true);", body)
    found = [clause.strip() for refusal in refusals for clause in refusal.split("||")]
    return [clause for clause in found if clause not in ("out_of_range", "!coop.leader()")]


def test_no_check_can_be_taken_out(tmp_path: Path) -> None:
    """Each, one by one, is replaced by one that never refuses; the program must then find lists that are believed."""
    unnoticed, taken_out = [], 0
    for name, function in CHECKED.items():
        original = (ROOT / name).read_text()
        found = clauses(original, function)
        assert len(found) >= 3, found
        for clause in found:
            shutil.copytree(ROOT / "cuda", tmp_path / "cuda", dirs_exist_ok=True)
            shutil.copytree(HERE, tmp_path / "tests/fuzz", dirs_exist_ok=True, ignore=shutil.ignore_patterns("corpus"))
            assert original.count(clause) == 1, clause
            (tmp_path / name).write_text(original.replace(clause, "false"))
            command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-w", str(tmp_path / "tests/fuzz/bounds.cpp")]
            subprocess.run([*command, "-o", str(tmp_path / "bounds")], check=True)
            done = subprocess.run([tmp_path / "bounds"], capture_output=True, text=True, timeout=60)
            taken_out += 1
            if done.returncode == 0:
                unnoticed.append(clause)
    assert unnoticed == []
    assert taken_out >= 26
