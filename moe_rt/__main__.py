"""Entry point of `python -m moe_rt`, which runs the command line of cli.py."""

from moe_rt.cli import main

main(prog_name="moe-rt")
