"""The benchmark over emulated nodes: outputs are right, and the bytes at the interfaces agree with the formula.

The formula leaves out headers. A row, of 4096 bytes here, needs at most three segments of 1448 and may be a message by
itself. Each segment has 66 bytes of Ethernet, IP and TCP headers and an acknowledgement of 66 bytes; UCX adds up to 64
bytes to a message; a request for a pulled row takes up to 64 + 66 bytes. That is 6 * 66 + 64 + 130, less than 600 bytes
a row. Counts, announcements, flushes and the segments that TCP sends again on a busy machine are a few packets per pair
of ranks: 64 KiB are a hundred times as many. A row sent twice would add 4096 bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.needs_nodes import new_cluster
from support.tool_environments import ROOT, python_of

from moe_rt.cli import main
from moe_rt.lab.cluster import cluster as module
from moe_rt.lab.cluster.cluster import NETNS

SIZES = ("--tokens", "64", "--experts", "16", "--topk", "4", "--hidden", "2048", "--iters", "2", "--warmup", "1")
ROW_BYTES, HEADERS_OF_A_ROW, FEW_PACKETS = 4096, 600, 1 << 16
HANG_S = 800.0


@pytest.fixture(scope="module")
def rights() -> None:
    new_cluster(1, name="may").down()


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def run_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert [result["errors"] for result in run["results"]] == [[]] * len(run["results"])
    assert run["absent"] == {}
    return run


@pytest.mark.usefixtures("rights")
@pytest.mark.parametrize("nodes", ["2", pytest.param("3", marks=pytest.mark.sweep)])
def test_bytes_are_those_of_the_formula(nodes: str) -> None:
    run = run_of(bench("--nodes", nodes, *SIZES, "--contestants", "moe_rt,moe_rt_flat,a2a"))
    assert run["moe_rt"]["route"] == "two_level"
    assert run["round_trip_us"] > 0
    links = {result["contestant"]: result["link"] for result in run["results"]}
    for name, link in links.items():
        for sent, formula in zip(link["sent"], link["formula"], strict=True):
            most = formula * (1 + HEADERS_OF_A_ROW / ROW_BYTES) + FEW_PACKETS
            assert formula < sent < most, name
        assert sum(link["received"]) == pytest.approx(sum(link["sent"]), rel=0.01), name
    sent = {name: sum(link["sent"]) for name, link in links.items()}
    assert sent["moe_rt"] < sent["moe_rt_flat"] < sent["a2a"]
    assert not list(NETNS.glob(f"bench_{os.getpid()}*"))


@pytest.mark.sweep
@pytest.mark.usefixtures("rights")
def test_open_mpi_takes_part(tmp_path: Path) -> None:
    """mpirun starts ranks in both nodes, without ssh, and outputs are right."""
    pins = ROOT / "tools" / "third_party" / "mpi.txt"
    python = python_of("third_party", "mpi", pins, "tools/install_third_party.py")
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [python, "-m", "moe_rt", "bench", "--nodes", "2", *SIZES, "--contestants", "moe_rt,mpi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    (run,) = document["runs"]
    assert document["settings"]["started_by"] == "mpirun"
    assert {result["contestant"]: result["errors"] for result in run["results"]} == {"moe_rt": [], "mpi": []}
    link = run["results"][1]["link"]
    assert all(formula < sent for sent, formula in zip(link["sent"], link["formula"], strict=True))


@pytest.mark.usefixtures("rights")
def test_a_benchmark_that_is_killed_leaves_nothing() -> None:
    """A benchmark that is killed leaves no rank and no node."""
    command = [
        sys.executable,
        "-m",
        "moe_rt",
        "bench",
        "--nodes",
        "2",
        "--iters",
        str(10**6),
        "--contestants",
        "moe_rt",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cluster = module.Cluster(f"bench_{process.pid}")
    deadline = time.monotonic() + HANG_S
    try:
        while cluster.num_nodes < 2 or any(len(ranks_of(cluster, node)) < 2 for node in range(2)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
        process.wait()
        while list(NETNS.glob(f"{cluster.name}-*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        cluster.down()


def ranks_of(cluster: module.Cluster, node: int) -> list[int]:
    """Return the process ids of the ranks that have started."""
    try:
        return [
            pid
            for pid in cluster.processes(node)
            if b"moe_rt.lab.bench.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
    except (module.InvalidConfig, OSError):  # the node, or a process of it, has gone
        return []


def test_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = bench("--nodes", "2", "--contestants", "moe_rt")
    assert done.exit_code == 1
    assert "expected root; sudo moe-rt nodes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1gbit"], "--rate needs --nodes"),
        (["--nodes", "2", "--rate", "fast"], "rate: got 'fast'"),
        (["--nodes", "2", "--ranks", "3"], "ranks: got 3, expected a multiple of 2 nodes"),
        (["--nodes", "two"], "got 'two', expected positive numbers"),
    ],
)
def test_odd_options_are_refused(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code != 0
    assert message in done.stderr
