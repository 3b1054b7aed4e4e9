"""A version changes together with what it versions, so that ranks and readers of other builds are refused."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest
from support.cpp_programs import ROOT, compile_program

from moe_rt.config.spec import PROTOCOL_VERSION

OP_RECORD = "cuda/protocol/core/op_record.h"
SEGMENT_VERSION = re.search(r"kSegmentHeaderVersion = (\d+);", (ROOT / OP_RECORD).read_text())
assert SEGMENT_VERSION
# Maps what is versioned to the place of its number, the number, and a digest of the line of facts.cpp about it.
VERSIONED = {
    "protocol": ("PROTOCOL_VERSION in moe_rt/config/spec.py", 7, "95317cfe30c3c4df"),
    "segment": (f"kSegmentHeaderVersion in {OP_RECORD}", 3, "1df0ea46c646600e"),
}
NOW = {"protocol": PROTOCOL_VERSION, "segment": int(SEGMENT_VERSION[1])}


@pytest.mark.parametrize("name", VERSIONED)
def test_a_version_changes_with_what_it_versions(name: str) -> None:
    where, version, digest = VERSIONED[name]
    program = compile_program(Path(__file__).with_name("facts.cpp"))
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    facts = {line.split()[0]: hashlib.sha256(line.encode()).hexdigest()[:16] for line in lines}
    assert (facts[name] == digest) == (NOW[name] == version), (
        f"only one of {where} and of what it versions has changed: if builds before and after this change cannot read "
        f"each other, add 1 to the version; then enter {NOW[name]} and {facts[name]!r} in VERSIONED"
    )
    assert (facts[name], NOW[name]) == (digest, version), f"enter {NOW[name]} and {facts[name]!r} in VERSIONED"
