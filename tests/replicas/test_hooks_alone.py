"""torch's wrappers and optimizers meet experts that are spread over ranks: what is refused before anything is sent."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from moe_rt.errors import InvalidConfig
from moe_rt.nn import wrappers
from moe_rt.nn.averaging import Mean
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.part import Part, Whole
from moe_rt.nn.spread import HELD

ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
OF_EXPERTS = {f"0.{name}" for name in ("gate_up_proj", "down_proj", HELD)}


def model(num_ranks: int = 2, mean: Mean | None = None) -> nn.Module:
    experts = SwiGLUExperts(2, 4, 2)
    group: Any = SimpleNamespace(group_name="a group")
    experts.spread_over(num_ranks, group, (0, 1), 4)
    experts.mean = mean
    return nn.Sequential(experts, nn.Linear(2, 2))


def wrap(kind: type[nn.Module], inside: nn.Module, ignored: set[str] | None = None) -> nn.Module:
    """Give a wrapper its module as its constructor does, without a process group."""
    wrapper = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper.process_group = "the wrapper's"  # type: ignore[assignment]
    if ignored is not None:
        wrapper.parameters_to_ignore = ignored  # type: ignore[assignment]
    wrapper.module = inside
    return wrapper


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers.watch_wrappers()
    monkeypatch.setattr(wrappers.dist, "get_world_size", {"the wrapper's": 2}.__getitem__)


@pytest.mark.parametrize("kind", [DistributedDataParallel, DataParallel])
def test_experts_are_no_copies(kind: type[nn.Module]) -> None:
    """A wrapper that would broadcast or average them is refused unless they are prepared and left out."""
    mean = Mean(2, None)
    for inside, ignored in (
        (model(), OF_EXPERTS),
        (model(mean=mean), None),
        (model(mean=mean), set()),
        (model(mean=mean), OF_EXPERTS - {"0.down_proj"}),
        (model(mean=mean), OF_EXPERTS - {f"0.{HELD}"}),
    ):
        with pytest.raises(InvalidConfig) as raised:
            wrap(kind, inside, ignored)
        assert str(raised.value).startswith(
            f"{kind.__name__}: got 0 spread over 2 ranks, whose parts it takes for copies of one another; expected "
            "moe_rt.parallel.prepare(model), called with the model that DistributedDataParallel gets"
        )
    with pytest.raises(InvalidConfig, match=rf"^{kind.__name__}: got experts spread over 2 ranks"):
        wrap(kind, model()[0])  # type: ignore[index]


def test_prepared_and_local_experts_are_let() -> None:
    wrap(DistributedDataParallel, model(mean=Mean(2, None)), OF_EXPERTS | {"another"})
    wrap(DistributedDataParallel, model(1))
    wrap(DistributedDataParallel, nn.Linear(2, 2))
    nn.Sequential(model())
    wrapper = wrap(DistributedDataParallel, model(1))
    wrapper.register_module("none", None)


def test_a_wrapper_over_other_ranks_is_refused() -> None:
    with pytest.raises(InvalidConfig) as raised:
        wrap(DistributedDataParallel, model(mean=Mean(3, None)), OF_EXPERTS)
    assert str(raised.value).startswith("DistributedDataParallel: got 2 ranks, expected the 3 of the group that")


def test_an_adapter_s_parameters_become_parts_when_it_is_wrapped() -> None:
    adapter = nn.Sequential(model(mean=Mean(2, None))[0], linear := nn.Linear(2, 2))  # type: ignore[index]
    holder = nn.Module()
    holder.holds_experts = True  # type: ignore[assignment]
    holder.experts = adapter
    names = {f"experts.0.{name}" for name in ("gate_up_proj", "down_proj", HELD)}
    names |= {"experts.1.weight", "experts.1.bias"}
    wrap(DistributedDataParallel, holder, names)
    assert isinstance(linear.weight, Part)


class Zero(torch.optim.SGD):
    """Stands in for ZeroRedundancyOptimizer."""


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, Zero])
def test_optimizers(monkeypatch: pytest.MonkeyPatch, kind: Any, spread: bool, imported: bool) -> None:
    """LBFGS and ZeRO treat parameters as copies; all others may step."""
    monkeypatch.delitem(sys.modules, ZERO, raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, ZERO, SimpleNamespace(ZeroRedundancyOptimizer=Zero))  # type: ignore[arg-type]
    whole = Whole("a group", (0, 1), 4) if spread else None
    p: Any = Part(torch.ones(2, 3), whole=whole) if spread else nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3)
    groups = [p] if kind is torch.optim.LBFGS else [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [p]}]
    optimizer = kind(groups, lr=0.5)
    refused = spread and (kind is torch.optim.LBFGS or (kind is Zero and imported))
    if refused:
        with pytest.raises(InvalidConfig, match=r"^(LBFGS|ZeroRedundancyOptimizer): got experts that are spread over"):
            optimizer.step(lambda: torch.zeros(()))
        assert bool((p == 1).all())
        return
    optimizer.step(lambda: torch.zeros(()))
    assert bool((p < 1).all())


def test_loaded_states_become_parts_before_a_step() -> None:
    p: Any = Part(torch.ones(2, 3), whole=Whole("a group", (2, 3), 4))
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)
    optimizer.state[p]["momentum_buffer"] = torch.arange(4.0).view(4, 1).expand(4, 3).clone()
    p.grad = torch.zeros(2, 3)
    optimizer.step()
    momentum = optimizer.state[p]["momentum_buffer"]
    assert isinstance(momentum, Part)
    assert momentum.tolist() == [[1.0] * 3, [1.5] * 3]


def test_parts_are_updated_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's optimizers do that for the types that they know, on GPUs, for which this CPU stands here."""
    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    part = Part(torch.ones(2, 3), whole=Whole("a group", (0, 1), 4))
    assert torch_optimizer._default_to_fused_or_foreach([part], False) == (False, True)
