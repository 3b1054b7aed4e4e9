"""The command line `moe-rt`. A command is imported when it is called: torch takes a second, and some do not need it."""

from __future__ import annotations

from importlib import import_module

import click

_ROOMS = {"bench": "bench", "chaos": "chaos", "gpucheck": "check", "nodes": "cluster"}
_HOMES = {name: f"moe_rt.lab.{room}.cli" for name, room in _ROOMS.items()}
_HOMES |= {"compile": "moe_rt.lab.check.precompile"}
_HOMES |= {"calibrate": "moe_rt.lab.bench.calibrate", "docs": "moe_rt.pages", "info": "moe_rt.info"}
_HOMES |= {"diff": "moe_rt.diagnostics.diff", "on-cpu": "moe_rt.lab.on_cpu.cli", "plan": "moe_rt.plan.cli"}


class _Commands(click.Group):
    """Commands, each found under its own name in the module that _HOMES names."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(_HOMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return getattr(import_module(_HOMES[name]), name.replace("-", "_")) if name in _HOMES else None


@click.group(cls=_Commands)
@click.version_option(package_name="moe_rt")
def main() -> None:
    """Sync-free mixture-of-experts dispatch over symmetric memory."""
