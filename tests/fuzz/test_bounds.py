"""Bounds on peers' lists: each is tested one step inside and outside, and no check can be removed unnoticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from support.cpp_programs import ROOT, compile_program

HERE = Path(__file__).parent
CHECKED = (
    ("cuda/protocol/flat/index.h", "sum_of_counts"),
    ("cuda/protocol/flat/index.h", "plausible"),
    ("cuda/protocol/flat/dispatch.h", "gather_token"),
    ("cuda/protocol/flat/dispatch.h", "unshared_copies"),
    ("cuda/gpu/rdma.h", "fetch_entries"),
    ("cuda/net/remote_network.h", "get_entries"),
    ("cuda/net/remote_network.h", "get"),
    ("cuda/protocol/two_level/forward.h", "mark_tokens"),
    ("cuda/protocol/two_level/forward.h", "mark_token"),
    ("cuda/protocol/two_level/forward.h", "mark_entries"),
)


def test_every_bound() -> None:
    program = compile_program(HERE / "bounds.cpp", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lists_over_a_network() -> None:
    program = compile_program(
        HERE / "remote_lists.cpp", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr


def clauses(text: str, function: str) -> list[str]:
    """Return the conditions under which a function refuses, one by one."""
    begin = text.index(f" {function}(")
    end = re.compile(r"^\};?$", re.MULTILINE).search(text, begin)  # end of the function, or of its class
    assert end
    body = text[begin : end.start()]
    ends = "return false|return|return source|return kOutOfRange|wrong = true|credible = false"
    refusals = re.findall(rf"if \(([^;{{}}]*?)\)\s*\{{?\s*(?:{ends});", body)
    found = [clause.strip() for refusal in refusals for clause in refusal.split("||")]
    return [clause for clause in found if clause != "out_of_range"]


# Disables the check with this number.
SWITCH = """#include <cstdlib>
inline bool stays(int check) {
  static const int out = std::atoi(std::getenv("TAKEN_OUT"));
  return check != out;
}
"""


def test_no_check_can_be_taken_out(tmp_path: Path) -> None:
    """Each check is disabled in turn; the program must then report lists that are wrongly believed."""
    shutil.copytree(ROOT / "cuda", tmp_path / "cuda")
    shutil.copytree(HERE, tmp_path / "tests/fuzz", ignore=shutil.ignore_patterns("corpus"))
    (tmp_path / "switch.h").write_text(SWITCH)
    checks: list[str] = []
    for name, function in CHECKED:
        text = (tmp_path / name).read_text()
        found = clauses(text, function)
        assert len(found) >= 2, found
        for clause in found:
            assert text.count(clause) == 1, clause
            text = text.replace(clause, f"(stays({len(checks)}) && ({clause}))")
            checks.append(clause)
        (tmp_path / name).write_text(text)
    assert len(checks) >= 33
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-w", "-include", str(tmp_path / "switch.h")]
    subprocess.run([*command, str(tmp_path / "tests/fuzz/bounds.cpp"), "-o", str(tmp_path / "bounds")], check=True)

    def believes(taken_out: int) -> bool:
        environment = {**os.environ, "TAKEN_OUT": str(taken_out)}
        return subprocess.run([tmp_path / "bounds"], env=environment, capture_output=True, timeout=3000).returncode != 0

    assert not believes(-1)
    assert [check for number, check in enumerate(checks) if not believes(number)] == []
