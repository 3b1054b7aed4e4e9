"""A run that ignores a signal, as under nohup, continues when it arrives."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.needs_nodes import new_cluster

HANG_S = 600.0


def test_a_terminal_that_is_closed() -> None:
    with new_cluster(1, name="nohup") as cluster:
        code = "import signal, sys\n"
        code += "from moe_rt.lab.cluster.cluster import Cluster\nfrom moe_rt.lab.cluster.run import run\n"
        code += "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        code += "sys.exit(run(Cluster(sys.argv[1]), 0, ['sh', '-c', 'echo started; read word; echo $word']))"
        words = [sys.executable, "-c", code, cluster.name]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGHUP)
        assert process.communicate("goes on\n", timeout=HANG_S)[0] == "goes on\n"
        assert process.returncode == 0
