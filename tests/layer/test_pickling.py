"""Layers as pickles: torch.save of a whole model, deep copies, and processes that receive one."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer import cases_pickling as cases
from layer.cases_layer import config, inputs_for
from support.ranks import Ranks

from moe_rt import MoELayer
from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]
SPAWN_TIMEOUT_S = 1200.0


def test_a_model_of_one_rank() -> None:
    layers, x = cases.model(), inputs_for(0, 7)
    expected = cases.step(layers, x)
    again = cases.loaded(cases.saved(layers))
    torch.testing.assert_close(cases.step(again, x), expected, rtol=0, atol=0)
    assert again[0].buffer is again[1].buffer
    assert again[0].buffer is not layers[0].buffer, "another process would have none either"


def test_a_pickle_of_a_loaded_model_that_was_never_used() -> None:
    layers, x = cases.model(), inputs_for(0, 7)
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(layers))))
    torch.testing.assert_close(cases.step(again, x), cases.step(layers, x), rtol=0, atol=0)


def test_a_deep_copy_shares_the_buffer() -> None:
    layers = cases.model()
    copied = copy.deepcopy(layers)
    assert copied[0].buffer is layers[0].buffer
    assert copied[0].router.weight is not layers[0].router.weight


def test_a_spawned_process_runs_what_it_was_handed() -> None:
    layers, x = cases.model(), inputs_for(0, 7)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process: Any = context.Process(target=cases.child, args=(theirs, layers))
    process.start()
    ours.send(x)
    assert ours.poll(SPAWN_TIMEOUT_S)
    torch.testing.assert_close([torch.tensor(t) for t in ours.recv()], cases.step(layers, x))
    process.join(SPAWN_TIMEOUT_S)
    assert process.exitcode == 0


def test_a_model_of_the_default_group(make_ranks: MakeRanks) -> None:
    make_ranks("shm", 2).run(cases.of_the_default_group)


def test_loaded_experts_are_still_those_of_all_ranks(make_ranks: MakeRanks) -> None:
    """torch's clip counts the experts of all ranks after unpickling, although a pickle has plain parameters."""
    norms = make_ranks("shm", 2).run(cases.clipped)
    assert len({norm for both in norms for norm in both}) == 1, norms


def test_a_pickle_of_another_rank_is_refused_by_all(make_ranks: MakeRanks) -> None:
    """All ranks refuse a model whose pickle is another rank's: half of the experts would exist twice."""
    here, there = make_ranks("shm", 2).run(cases.of_another_rank)
    assert "got a pickle of rank 0 of 2 on rank 1 of 2" in there
    assert there.startswith("InvalidConfig: ")
    assert here.startswith("GroupPoisoned: ")


def test_a_process_without_the_group_is_reported(make_ranks: MakeRanks) -> None:
    data = make_ranks("shm", 2).run(cases.given_away)[1]
    assert "rank 1 of 2" in cases.without_a_group(data)
    assert "init_process_group" in cases.without_a_group(data)


@pytest.mark.parametrize(("heap", "over"), [("threads", "threads"), ("shm", "own group")])
def test_a_group_that_nobody_else_finds_is_refused(make_ranks: MakeRanks, heap: str, over: str) -> None:
    for text in make_ranks(heap, 2).run(cases.refused, over):
        assert "state_dict()" in text


def test_a_buffer_says_that_it_does_not_travel() -> None:
    with pytest.raises(InvalidConfig, match="memory that a group shares"):
        pickle.dumps(cases.model()[0].buffer)


def test_a_loaded_layer_keeps_no_buffer_of_a_dtype_that_it_never_had() -> None:
    """The dtype that the layer had before it was saved is of no use to it."""
    layer = MoELayer(config())
    layer(inputs_for(0, 7))
    again = pickle.loads(pickle.dumps(layer))
    assert again.buffer.spec.dtype is torch.float32
    again.to(torch.bfloat16)(inputs_for(0, 7).bfloat16())
    assert list(again._shared_buffers._by_dtype) == [torch.bfloat16]
