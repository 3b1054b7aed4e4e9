"""Functions that ranks run in the tests of wrappers and calls that must be refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mesh.cases_mesh import close, decoder, ep_mesh, moe_config
from mesh.cases_parallel import backward, ddp, parts, place, whole
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DataParallel, DistributedDataParallel

from moe_rt import MoELayer
from moe_rt.parallel.wrapping import prepare, shard_experts


def refused(group: Any, wrapper: str, how: str) -> bool:
    """Raise what the wrapper raises; no weight may have changed."""
    model = decoder(group)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        if how == "another module":
            prepare(model)
            model = nn.Sequential(model)
        elif how == "copy of experts":
            model = nn.ModuleDict({"prepared": prepare(decoder(group)), "not": model})
        if wrapper == "fsdp2":
            fully_shard(model)
        elif wrapper == "fsdp1":
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        elif wrapper == "dp":
            DataParallel(model)
        else:
            DistributedDataParallel(model)
        return False
    finally:
        if wrapper == "ddp" and not how:
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        close(model)


def refused_zero(group: Any) -> None:
    model = ddp(decoder(group))
    before = whole(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    backward(model, parts(0, group.rank(), group.size(), 1))
    try:
        zero.step()
    finally:
        torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
        close(model)


def refused_groups(group: Any, how: str) -> None:
    """Prepare with expert-parallel groups of three ranks and one, or with a group that lacks a rank of the first."""
    subgroups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3])]
    layer = MoELayer(moe_config(), subgroups[0] if group.rank() < 3 else subgroups[1])
    lone = dist.new_group([0, 1])
    try:
        if how == "sizes":
            prepare(layer)
        elif group.rank() < 2:
            prepare(layer, lone)
    finally:
        layer.buffer.close()


def refused_threads(group: Any) -> None:
    layer = MoELayer(moe_config(), group)
    try:
        prepare(layer)
    finally:
        layer.buffer.close()


def twice(group: Any, first: str) -> None:
    mesh = ep_mesh(1, group.size())
    model = decoder(mesh["ep"])
    calls = {"prepare": lambda: prepare(model), "shard": lambda: shard_experts(model, mesh["efsdp"])}
    try:
        calls.pop(first)()
        [second] = calls.values()
        second()
    finally:
        close(model)


def of_another_group(group: Any) -> None:
    ep = place(group, 2)
    model = decoder(ep)
    try:
        DistributedDataParallel(prepare(model, ep))
    finally:
        close(model)
