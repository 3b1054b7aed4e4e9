"""Messages of UCX ranks, without UCX: a network's guarantees, and a peer that requests memory outside a segment."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cpp_programs import compile_program

SOURCE = Path(__file__).parent / "ucx_messages.cpp"


def test_promises_and_refusals() -> None:
    """AddressSanitizer and UBSan report accesses next to a segment, or after its release."""
    program = compile_program(SOURCE, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "every promise kept, every message refused\n"


def test_bounds_of_messages() -> None:
    """Whatever a message says of places and lengths, it is accepted up to its bounds and refused past them."""
    program = compile_program(SOURCE.with_name("message_bounds.cpp"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
