"""Programs that start ranks on emulated nodes, one by one or by mpirun."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_rt.bench.cases import Case
from moe_rt.nodes.cluster import Cluster
from moe_rt.nodes.inside import INTERFACE
from moe_rt.nodes.run import in_node
from moe_rt.testing.programs import Program

# Interface for all traffic. UCX and Open MPI would also try the loopback interface, which reaches no other node.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "UCX_NET_DEVICES": INTERFACE}
_MPIRUN_FLAGS = (
    *("--leave-session-attached", "--prtemca", "plm_ssh_no_tree_spawn", "1"),
    *("--prtemca", "prte_if_include", INTERFACE, "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
    *("--mca", "btl_tcp_if_include", INTERFACE),
)
# Replaces ssh: the shell that waits in that node receives the command line and splits it, as with ssh.
_AGENT = '#!/bin/sh\nhost=$1; shift; echo "$*" > "$(dirname "$0")/$host/command"\n'
_AWAIT = 'read -r command < "$0"; eval "$command"'


def programs(cluster: Cluster, case: Case, command: Sequence[str], environment: Mapping[str, str]) -> list[Program]:
    """One program per rank, with its rank in RANK."""
    environment = {**environment, **_ENVIRONMENT}
    return [
        Program(in_node(cluster, node, command), {**environment, "RANK": str(rank)})
        for rank, node in enumerate(case.topology.nodes)
    ]


def programs_of_mpi(
    cluster: Cluster,
    case: Case,
    directory: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    mpirun: Sequence[str],
) -> list[Program]:
    """mpirun in the first node, and in each other node a shell that becomes its daemon."""
    agent = directory / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o700)
    each = case.ranks // case.nodes
    hosts = ",".join(f"node{node}:{each}" for node in range(case.nodes))
    started = [*mpirun, *_MPIRUN_FLAGS, "--prtemca", "plm_ssh_agent", str(agent), "--host", hosts]
    started += ["--map-by", f"ppr:{each}:node", "-n", str(case.ranks), *command]
    commands = [started]
    for node in range(1, case.nodes):
        commands.append(["sh", "-c", _AWAIT, str(directory / f"node{node}" / "command")])
    made = []
    for node, words in enumerate(commands):
        own = directory / f"node{node}"  # nodes share /tmp and process ids, and Open MPI names its files by them
        own.mkdir()
        os.mkfifo(own / "command")
        made.append(Program(in_node(cluster, node, words), {**environment, **_ENVIRONMENT, "TMPDIR": str(own)}))
    return made
