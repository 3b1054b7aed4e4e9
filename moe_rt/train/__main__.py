"""Entry point of `python -m moe_rt.train` and `torchrun -m moe_rt.train`: runs the command line of cli.py."""

from moe_rt.train.cli import main

main()
