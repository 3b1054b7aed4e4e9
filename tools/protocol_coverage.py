"""Print the share of cuda/protocol that the C++ test programs run: CPU ranks, emulated GPUs and an emulated network.

    python tools/protocol_coverage.py [--below]

With --below, it also lists the lines that no program runs. It needs g++ and gcovr, which the extra `dev` installs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_sources import ENGINE, ROWS

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build/coverage"
FLAGS = ("-std=c++20", "-O0", "-DMOE_RT_WEAKENABLE", "-Wno-psabi", "-ffp-contract=off", "-pthread", "--coverage")
CPU = (*ENGINE, *ROWS)
GPU, NETWORK = ("-DMOE_RT_EMULATED_GPU",), ("-DMOE_RT_EMULATED_GPU", "-DMOE_RT_EMULATED_NETWORK")
STRESS, PEERS, ROUTING = "tests/protocol/stress.cpp", "tests/fuzz/peers.cpp", "tests/fuzz/routing.cpp"
REPLAY, CORPUS = "tests/fuzz/replay.cpp", ROOT / "tests/fuzz/corpus"
CHAINS = ("3", "3", "20")  # ranks, lanes, rounds

# Program -> its sources, its defines, and its arguments.
PROGRAMS: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "chains": ((STRESS, *CPU), (), CHAINS),
    "chains-nodes": ((STRESS, *CPU), (), ("5", "2", "20", "1", "experts", "-", "2", "9", "two_level")),
    "chains-gpu": ((STRESS, *ROWS), GPU, CHAINS),
    "chains-network": ((STRESS, *ROWS), NETWORK, CHAINS),
    "peers": ((PEERS, REPLAY, *CPU), (), sorted(map(str, (CORPUS / "peers").iterdir()))),
    "peers-gpu": ((PEERS, REPLAY, *ROWS), GPU, sorted(map(str, (CORPUS / "peers").iterdir()))),
    "routing": ((ROUTING, REPLAY, *ROWS), (), sorted(map(str, (CORPUS / "routing").iterdir()))),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--below", action="store_true", help="list the lines that no program runs")
    below = parser.parse_args().below
    for name, (sources, defines, arguments) in PROGRAMS.items():
        directory = OUT / name
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("*.gcda"):
            old.unlink()
        files = [str(ROOT / source) for source in sources]
        subprocess.run(["g++", *FLAGS, *defines, *files, "-o", name], cwd=directory, check=True)
        subprocess.run([directory / name, *arguments], cwd=directory, check=True, stdout=subprocess.DEVNULL)
    report = [sys.executable, "-m", "gcovr", "--root", str(ROOT), "--filter", "cuda/protocol/", "--merge-lines"]
    report += ["--gcov-ignore-parse-errors", "all", *([] if below else ["--txt-summary"]), str(OUT)]
    return subprocess.run(report, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
