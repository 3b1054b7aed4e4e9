"""Compiled models in DDP train as one process does, and a compiled update leaves the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mesh import cases_parallel as cases
from mesh.test_data_parallel import check
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(("world", "ep"), [(2, 2), *(pytest.param(4, ep, marks=pytest.mark.sweep) for ep in (2, 4))])
def test_ddp_compiled(make_ranks: MakeRanks, world: int, ep: int) -> None:
    how = {"compile": True, "clip": "torch"}
    check(make_ranks("shm", world).run(cases.ddp_steps, ep, how, {}), how)


def test_a_compiled_update_is_the_same(make_ranks: MakeRanks) -> None:
    for eager, compiled in make_ranks("shm", 2).run(cases.compiled_update):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)
