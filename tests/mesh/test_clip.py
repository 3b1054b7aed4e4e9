"""The norm for clipping equals one process's for every layout of parameters, and is identical on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mesh import cases_mesh as cases
from support.ranks import Ranks, ThreadRanks
from torch import nn

from moe_rt import MoELayer
from moe_rt.errors import InvalidConfig
from moe_rt.parallel import clip_grad_norm_

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("size", "kind"),
    [(size, kind) for size in (1, 2, 4) for kind in ("group", "mesh")] + [(4, "fsdp"), (4, "fsdp over a group")],
)
def test_norm_is_that_of_one_process(make_ranks: MakeRanks, size: int, kind: str) -> None:
    expected = cases.clipped(None, "group")
    assert expected == pytest.approx((0.51, 0.1), rel=1e-2)
    results = make_ranks("shm", size).run(cases.clipped, kind)
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_gradients(make_ranks: MakeRanks) -> None:
    """A rank whose experts got no token, or whose backward was skipped, calls the collectives of the others."""
    for without in ("experts", "everything"):
        assert len(set(make_ranks("shm", 2).run(cases.clipped_without, without))) == 1


def test_any_mixture_of_tensors(make_ranks: MakeRanks) -> None:
    expected = (2 * 4**2 + 2 * 3**2 + 2 * 5**2) ** 0.5
    for got in make_ranks("shm", 2).run(cases.clipped_by_hand):
        assert got == pytest.approx([expected, *(x / expected for x in (4, 4, 3, 3, 5, 5))], rel=1e-6)


def test_threads_are_refused() -> None:
    for outcome in ThreadRanks(2).outcomes(cases.clipped_threads):
        with pytest.raises(InvalidConfig, match="got 2 ranks that are threads, expected a ProcessGroup"):
            raise outcome


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("norm", [1e-3, 0.5, 2.0, 1e4])
def test_gradients_are_scaled_as_torch_scales_them(norm: float, max_norm: float) -> None:
    models = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)) for _ in range(2)]
    drawn = [torch.randn(p.shape) for p in models[0].parameters()]
    whole = torch.cat([g.flatten() for g in drawn]).norm()
    for model in models:
        for p, grad in zip(model.parameters(), drawn, strict=True):
            p.grad = grad * norm / whole
        model[2].bias.grad = None
    got, expected = (
        clip_grad_norm_(models[0], max_norm),
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), max_norm),
    )
    assert float(got) == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_not_rounded(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Linear(64, 64), MoELayer(cases.moe_config())]).to(dtype)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(dtype)
    expected = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    assert float(clip_grad_norm_(model, 1e9)) == pytest.approx(float(expected), rel=1e-12)
    cases.close(model)
