"""Activates on-cpu in a Python process whose PYTHONPATH begins with this folder, as `moe-rt on-cpu` sets it.

Python imports this module when it starts. Another sitecustomize further down the path runs afterwards, as it would
without this one.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next_one() -> None:
    others = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("MOE_RT_ON_CPU"):
    try:
        from moe_rt.lab.on_cpu import activate
    except ModuleNotFoundError as error:
        print(f"moe-rt on-cpu: {sys.executable} has no {error.name}, so CUDA stays as it is there", file=sys.stderr)
    else:
        activate()
_run_the_next_one()
