"""The command `moe-rt nodes`."""

from __future__ import annotations

from typing import Any

import click

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.lab.cluster.cluster import MOST_NODES, Cluster
from moe_rt.lab.cluster.run import run as run_in_node

_name = click.option("--cluster", "name", default="moe_rt", show_default=True, help="Name of the cluster.")


class _Sentences(click.Group):
    """Reports the errors of these commands as one sentence."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (InvalidConfig, MissingPackage) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Sentences)
def nodes() -> None:
    """Rehearse a cluster on this machine: nodes with separate networks, processes and host names.

    It needs Linux, root and iproute2. Nodes reach each other as node0, node1, ..., and nothing else.
    """


@nodes.command()
@click.argument("number", type=click.IntRange(min=1, max=MOST_NODES))
@click.option("--rate", help="Send and receive limit of each node, such as 200mbit or 1gbit; default: no limit.")
@_name
def up(number: int, rate: str | None, name: str) -> None:
    """Make NUMBER nodes."""
    cluster = Cluster(name)
    cluster.up(number, rate)
    for node in range(number):
        click.echo(f"node{node}  {cluster.address(node)}")


@nodes.command(context_settings={"ignore_unknown_options": True})
@click.argument("node", type=click.IntRange(min=0))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_name
def run(node: int, command: tuple[str, ...], name: str) -> None:
    """Run a COMMAND in a NODE: moe-rt nodes run 0 -- hostname. Processes that it leaves running end with it."""
    raise SystemExit(run_in_node(Cluster(name), node, command))


@nodes.command()
@_name
def down(name: str) -> None:
    """End all processes of all nodes, and remove the nodes. It succeeds if none exist."""
    Cluster(name).down()
