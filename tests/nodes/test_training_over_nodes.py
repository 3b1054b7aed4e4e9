"""Training over emulated nodes, as docs/howto/cluster.md shows: the loss of one node, and resuming after a death."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_python import commands, run_python
from support.needs_nodes import new_cluster
from train.cases_train import TINY

from moe_rt.lab.cluster.cluster import INTERFACE, Cluster
from moe_rt.lab.cluster.run import in_node
from moe_rt.lab.testing.programs import Program, running

DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "cluster.md"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node0:29500"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "UCX_NET_DEVICES": INTERFACE}
LAYOUTS = ((1, 2), (2, 2))
STEPS = 13  # one validation included
HANG_S = 600.0
# The error of a dispatch or combine, or of the gradients' all-reduce if rank 0 is there at the death.
WHO_DIED = r"the process of rank 1 ended, or the link to it is down|Connection (reset|closed) by peer"


def command(out: Path, ranks: int, *flags: str, **changes: object) -> list[str]:
    words = TORCHRUN.replace("node 2", f"node {ranks}").split()[1:]
    options = {**TINY, "out": out, **changes}
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", "moe_rt.train", *flags, *given]


@contextlib.contextmanager
def training(
    cluster: Cluster, layout: tuple[int, ...], out: Path, *flags: str, **changes: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a torchrun in each node."""
    programs = []
    for node, ranks in enumerate(layout):
        words = in_node(cluster, node, command(out, ranks, *flags, **changes))
        programs.append(Program(words, ENVIRONMENT, errors=subprocess.STDOUT))
    with running(programs) as processes:
        yield processes


def checkpoints(out: Path) -> list[int]:
    """Return the steps of whole checkpoints."""
    names = (path.name.removeprefix("step-") for path in out.glob("checkpoints/step-*"))
    return [int(name) for name in names if name.isdecimal()]


def losses(out: Path) -> list[float]:
    """Return losses of training and of validation, in the order of steps."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("val_loss")) for row in rows]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with new_cluster(2, name="train") as made:
        yield made


@pytest.fixture(scope="module")
def on_one_node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("one")
    words = [word.replace("node0:29500", "localhost:0") for word in command(out, 4, steps=STEPS)]
    words[words.index("--nnodes") + 1] = "1"
    forked = {"PYTHON_EXEC": str(commands() / "python")}  # these ranks run on this host, so they can be forked
    done = run_python(*words[1:], env={**os.environ, **forked, "OMP_NUM_THREADS": "1"}, limit_s=HANG_S)
    assert done.returncode == 0, done.stderr
    return losses(out)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_loss_curve_is_that_of_one_node(
    cluster: Cluster, on_one_node: list[float], layout: tuple[int, ...], tmp_path: Path
) -> None:
    with training(cluster, layout, tmp_path, steps=STEPS) as processes:
        said = [process.communicate(timeout=HANG_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    curve = losses(tmp_path)
    assert len(curve) == STEPS + 2
    assert curve == pytest.approx(on_one_node, abs=1e-4, rel=0)


def test_the_documented_command_is_this_one() -> None:
    assert f"-- {TORCHRUN} " in DOCUMENT.read_text()


def test_a_node_that_dies_ends_the_others_and_a_later_run_goes_on(tmp_path: Path) -> None:
    """The other node's error names the dead rank, or gloo's the lost link; a new cluster resumes training."""
    with new_cluster(2, name="dies") as cluster:
        with training(cluster, (1, 1), tmp_path, steps=10**6, checkpoint_every=2, val_every=10**6) as processes:
            deadline = time.monotonic() + HANG_S
            while not checkpoints(tmp_path):
                assert processes[0].poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(cluster.init_process(1), signal.SIGKILL)
            said, _ = processes[0].communicate(timeout=HANG_S)
            assert processes[0].returncode == 1
            assert re.search(WHO_DIED, said), said
        cluster.down()
        cluster.up(2)
        last = max(checkpoints(tmp_path)) + 4
        with training(cluster, (1, 1), tmp_path, "--resume", steps=last, checkpoint_every=2) as processes:
            said = "".join(process.communicate(timeout=HANG_S)[0] for process in processes)
        assert [process.returncode for process in processes] == [0, 0], said
        assert max(checkpoints(tmp_path)) == last
