"""A small model whose experts are distributed over ranks, and helpers of the tests of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel import prepare, whole_state_dict

HIDDEN, TOKENS = 16, 32


class Net(nn.Module):
    """A model with the same global weights for every group."""

    def __init__(self, group: Any, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Linear(HIDDEN, HIDDEN)
        fields = dict(hidden=HIDDEN, intermediate=24, num_experts=4, num_topk=2, num_max_tokens_per_rank=2 * TOKENS)
        self.moe = MoELayer(MoEConfig(**{**fields, **changes}), group)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.a(x))[0]

    @property
    def experts(self) -> Any:
        return self.moe.experts


@contextlib.contextmanager
def net(group: Any, prepared: bool = True, **changes: Any) -> Iterator[Net]:
    model = Net(group, **changes)
    if prepared:
        prepare(model)
    try:
        yield model
    finally:
        model.moe.buffer.close()


def mesh_of(group: Any) -> Any:
    return init_device_mesh("cpu", (group.size(),), mesh_dim_names=("ep",))


def batch(step: int, rank: int, world: int) -> Tensor:
    """Return this rank's part of a batch that does not depend on the number of ranks."""
    tokens = torch.randn(2 * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step))
    return tokens.chunk(world)[rank]


def loss_of(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> Tensor:
    x = batch(step, rank, world)
    return (model(x) - x.flip(-1)).square().mean()


def backward(model: nn.Module, group: Any = None, step: int = 0) -> Tensor:
    loss = loss_of(model, step, *((0, 1) if group is None else (group.rank(), group.size())))
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, group: Any, steps: int = 4) -> None:
    """Run steps of any optimizer that torch's own loops support, and of SAM's two."""
    for step in range(steps):
        backward(model, group, step)
        if hasattr(optimizer, "first_step"):
            optimizer.first_step()
            backward(model, group, step)
            optimizer.second_step()
        else:
            optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in whole_state_dict(model).items() if "held" not in name}


def trained(group: Any, make: Callable[[Any], Any], steps: int = 4, **changes: Any) -> dict[str, Tensor]:
    """Return whole weights after training with the optimizer that `make` returns: in DistributedDataParallel, or
    without a group in one process that has the whole batch and all experts.
    """
    with net(group, group is not None, **changes) as model:
        train(model if group is None else DistributedDataParallel(model), make(model.parameters()), group, steps)
        return whole(model)


def same_on_all(group: Any, value: Tensor) -> bool:
    got = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(got, value.detach().contiguous())
    return all(torch.equal(t, got[0]) for t in got)


def local(tensor: Any) -> Tensor:
    """Return a copy of this rank's part."""
    return (tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()).clone()
