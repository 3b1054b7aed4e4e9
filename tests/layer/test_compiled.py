"""Compiled models on ranks with different token counts, including zero: every op runs, in the program's order.

A compiler sees that outputs for no tokens are empty; moe_rt/ops/compile.py makes Inductor keep the ops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from layer import cases_chunks, cases_dtypes, cases_layer, cases_training
from layer import cases_compiled as cases
from layer.cases_kinds import layer_config
from support.ranks import Ranks
from torch import Tensor

from moe_rt import MoELayer

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("shape", cases.SHAPES, ids=lambda shape: shape.__name__)
def test_a_rank_without_tokens(make_ranks: MakeRanks, shape: Callable[[cases.Model, Tensor], Tensor]) -> None:
    """No rank drops or reorders an op in its compiled graph; otherwise all ranks would raise CallOrderMismatch."""
    assert max(make_ranks("shm", 2).run(cases.worst_difference, shape, [0, 9])) < 1e-4


def test_ops_that_write_what_they_are_given(make_ranks: MakeRanks) -> None:
    for outputs in make_ranks("shm", 2).run(cases.written_outputs, [0, 9]):
        for off in outputs:
            assert not len(off) or float(off.abs().max()) < 1e-5


@pytest.mark.parametrize("over_mesh", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["group", "mesh"])
def test_a_block_compiles_as_one_graph(make_ranks: MakeRanks, over_mesh: bool) -> None:
    for eager, compiled, (once, twice) in make_ranks("shm", 2).run(cases_training.compiled, over_mesh):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
        assert twice == [2 * count for count in once], "metrics count in compiled code as well"


def test_a_compiled_rank_next_to_one_that_overlaps(make_ranks: MakeRanks) -> None:
    """Ops in a graph are whole. They run in the order of the ranks that overlap."""
    for y, grad, same, same_grad in make_ranks("shm", 2).run(cases_chunks.ranks_differ, "compiled"):
        torch.testing.assert_close((same, same_grad), (y, grad))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.sweep)], ids=str)
def test_a_layer_compiles_as_one_graph(make_ranks: MakeRanks, dtype: torch.dtype) -> None:
    for out, grad in make_ranks("shm", 2).run(cases_layer.compiled, dtype):
        assert out < 1e-4
        assert grad < 1e-4


def test_graphs_make_the_buffers_that_they_need(make_ranks: MakeRanks) -> None:
    for differences in make_ranks("shm", 2).run(cases_dtypes.compiled):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("own", [False, True])
def test_compiled_ranks_take_means_in_the_order_of_those_that_overlap(make_ranks: MakeRanks, own: bool) -> None:
    """Means are collective over copies of the experts: they and exchanges must not wait for each other in a circle."""
    cases_chunks.check_means(make_ranks("shm", 4).run(cases_chunks.whole_next_to_copies, "compiled", own))


def test_experts_are_not_taken_for_those_of_fsdp() -> None:
    """No module sets `_is_fsdp_managed_module`, which torch's compiler reads as a class attribute also, where a
    property would count as true (torch 2.15).
    """
    layer = MoELayer(layer_config())
    for module in layer.modules():
        assert not inspect.getattr_static(module, "_is_fsdp_managed_module", False)
