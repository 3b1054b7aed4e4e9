"""A cluster of one process. A keeper program takes it down when that process ends, also after SIGKILL.

python -m moe_rt.lab.cluster.own_cluster NAME PIDFD
"""

from __future__ import annotations

import os
import select
import subprocess
import sys

from moe_rt.lab.cluster.cluster import Cluster


class OwnCluster(Cluster):
    """This process's cluster for a given purpose."""

    def __init__(self, purpose: str) -> None:
        super().__init__(f"{purpose}_{os.getpid()}")
        self._keeper: subprocess.Popen[bytes] | None = None

    def up(self, num_nodes: int, rate: str | None = None) -> None:
        """Create the nodes, see `Cluster.up`."""
        self._keeper = _start_keeper(self.name)
        try:
            super().up(num_nodes, rate)
        except BaseException:
            self._end_keeper()
            raise

    def down(self) -> None:
        """Remove the nodes, see `Cluster.down`."""
        super().down()
        self._end_keeper()

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()
            self._keeper = None


def _start_keeper(name: str) -> subprocess.Popen[bytes]:
    """Start this module as a program, in a separate session so that signals of this terminal do not reach it."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "moe_rt.lab.cluster.own_cluster", name, str(pidfd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[pidfd],
        )
    finally:
        os.close(pidfd)


def main() -> None:
    """Wait until the process of the descriptor has ended, then take the cluster down."""
    name, pidfd = sys.argv[1], int(sys.argv[2])
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    Cluster(name).down()


if __name__ == "__main__":
    main()
