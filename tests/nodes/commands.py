"""Commands in emulated nodes: started as programs, or run for their output."""

from __future__ import annotations

import subprocess
import sys

from support.forked_python import run_python

from moe_rt.lab.cluster.cluster import Cluster

RUN = """
import signal, sys; from moe_rt.lab.cluster.cluster import Cluster; from moe_rt.lab.cluster.run import run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
sys.exit(run(Cluster(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
"""


def start(cluster: Cluster, node: int, *command: str) -> subprocess.Popen[str]:
    words = ["-c", RUN, cluster.name, str(node), *command]
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, start_new_session=True)


def said(cluster: Cluster, node: int, *command: str) -> str:
    done = run_python("-c", RUN, cluster.name, str(node), *command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
