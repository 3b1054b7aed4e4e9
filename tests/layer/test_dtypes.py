"""A layer follows model.to() and autocast in the dtypes of rows and experts, and refuses other input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import HEAPS
from layer import cases_dtypes as cases
from layer.cases_layer import config, inputs_for
from support.ranks import Ranks

from moe_rt import Buffer, MoELayer
from moe_rt.errors import InvalidConfig, InvalidInput

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("how", cases.CASTS)
def test_follows_the_model_and_autocast(make_ranks: MakeRanks, heap: str, how: str) -> None:
    expected = cases.DTYPES.get(how, torch.float32)
    for followed, told, payload, products in make_ranks(heap, 2).run(cases.follows, how):
        torch.testing.assert_close(followed, told, rtol=0, atol=0)
        assert (payload, products) == (expected, expected)
        assert followed["out"].dtype is (torch.float32 if how.startswith("autocast") else expected)


@pytest.mark.parametrize("heap", HEAPS)
def test_evaluation_under_autocast_between_steps(make_ranks: MakeRanks, heap: str) -> None:
    for dtypes in make_ranks(heap, 2).run(cases.alternates):
        assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("heap", ["threads", "shm"])
def test_a_buffer_that_was_never_used_is_let_go(make_ranks: MakeRanks, heap: str) -> None:
    assert make_ranks(heap, 2).run(cases.unused_is_let_go) == [(True, torch.bfloat16)] * 2


@pytest.mark.parametrize(
    ("fixed", "how", "message"),
    [
        (torch.float32, "", None),
        (torch.float32, "bf16", "got torch.float32 in the config of a MoELayer .* have torch.bfloat16"),
        (torch.float32, "autocast", "got torch.float32 in the config of a MoELayer .* have torch.bfloat16"),
        (torch.bfloat16, "", "got torch.bfloat16 in the config of a MoELayer .* have torch.float32"),
        (torch.bfloat16, "bf16", None),
        (torch.bfloat16, "autocast", None),
    ],
    ids=str,
)
def test_a_fixed_dtype_that_disagrees_warns_once(
    make_ranks: MakeRanks, fixed: torch.dtype, how: str, message: str | None
) -> None:
    for warned in make_ranks("shm", 1).run(cases.warned, fixed, how):
        assert len(warned) == (message is not None)
        for text in warned:
            with pytest.raises(UserWarning, match=message):
                raise UserWarning(text)


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("what", ["int", "bool", "complex", "width", "scalar", "twice as wide", "topk_idx"])
def test_what_is_no_row_is_refused_on_every_rank(make_ranks: MakeRanks, heap: str, what: str) -> None:
    mine, theirs = make_ranks(heap, 2).outcomes(cases.refused, what)
    named = "topk_idx: got shape" if what == "topk_idx" else "x: got torch"
    with pytest.raises(InvalidInput, match=named):
        raise mine
    if heap == "loopback":
        assert "InvalidInput" in str(theirs) or "refused its input" in str(theirs)
    else:
        with pytest.raises(InvalidInput, match="rank 0 refused its input"):
            raise theirs


def test_autocast_leaves_fp64_alone() -> None:
    layer = MoELayer(config()).double()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(inputs_for(0, 6).double())
    assert (layer.buffer.spec.dtype, out.dtype) == (torch.float64, torch.float64)


def test_a_layer_made_alone_stays_alone() -> None:
    """A layer that was made without a process group stays without one when it needs a buffer of another dtype."""
    layer = MoELayer(config())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer(inputs_for(0, 3))
        assert layer.buffer.spec.dtype is torch.bfloat16
        assert layer.buffer.process_group is None
    finally:
        layer.buffer.close()
        dist.destroy_process_group()


def test_a_buffer_of_another_dtype_than_the_layers() -> None:
    """A buffer given to a layer that follows its input fixes the dtype; one given to a forward must have the same."""
    with (
        Buffer(None, **config().buffer_sizes(torch.bfloat16)) as half,
        Buffer(None, **config().buffer_sizes()) as whole,
    ):
        layer = MoELayer(config(), buffer=half)
        with pytest.warns(UserWarning, match="got torch.bfloat16 in the config of a MoELayer"):
            layer(inputs_for(0, 3))
        assert layer.buffer is half
        with pytest.raises(InvalidConfig, match=r"buffer\.dtype: got torch\.float32, expected torch\.bfloat16"):
            layer(inputs_for(0, 3), buffer=whole)
