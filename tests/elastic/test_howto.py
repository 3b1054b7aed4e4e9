"""The program of examples/elastic.py continues when a second rank dies while the others regroup."""

from __future__ import annotations

from pathlib import Path

from support.forked_python import run_python

PROGRAM = Path(__file__).resolve().parents[2] / "examples/elastic.py"

# Rank 2 is counted as a survivor, and dies before the new group exists.
DEATH_IN_SURVIVORS = """
import os, signal
from moe_rt.elastic import ElasticGroup

join = ElasticGroup._join

def die_or_join(self, store, left):
    if self._rank == 2 and len(left) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return join(self, store, left)

ElasticGroup._join = die_or_join
"""


def test_a_death_inside_survivors(tmp_path: Path) -> None:
    program = PROGRAM.read_text()
    one_dies, two_die = "for rank in ranks] == [0, -9, 0]", "for rank in ranks] == [0, -9, -9]"
    assert one_dies in program
    path = tmp_path / "program.py"
    path.write_text(DEATH_IN_SURVIVORS + program.replace(one_dies, two_die))
    done = run_python(path)
    assert done.returncode == 0, done.stderr
    assert "rank 0: PeerTimeout" in done.stdout
    assert "checkpoints/step-00000020\n" in done.stdout, "it went on from there"
