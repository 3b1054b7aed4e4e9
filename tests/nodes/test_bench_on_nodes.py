"""The benchmark over emulated nodes: outputs are right, and the bytes at the interfaces are those of the formula."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from nodes.needs_nodes import new_cluster

from moe_rt.cli import main
from moe_rt.nodes.cluster import NETNS

QUICK = ("--iters", "2", "--warmup", "1", "--tokens", "64", "--experts", "16", "--topk", "4", "--hidden", "2048")
TIMEOUT_S = 600.0
