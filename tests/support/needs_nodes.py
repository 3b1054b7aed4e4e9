"""Tests of emulated nodes are skipped without the rights to make them, or fail if every tool is required."""

from __future__ import annotations

import os

import pytest

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.lab.cluster.cluster import Cluster


def new_cluster(number: int, rate: str | None = None, name: str = "test") -> Cluster:
    """Return a new cluster that is up; the caller takes it down."""
    cluster = Cluster(f"{name}_{os.getpid()}")
    try:
        cluster.up(number, rate)
    except (InvalidConfig, MissingPackage) as error:
        if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
            raise
        pytest.skip(str(error))
    return cluster
