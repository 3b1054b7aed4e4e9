"""Makes `python -m moe_rt.train` and `torchrun -m moe_rt.train` run the command line of cli.py."""

from moe_rt.train.cli import main

main()
