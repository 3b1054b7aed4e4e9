"""Models and steps that ranks record and replay in the tests of routes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from layer.cases_router import FAMILY
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_rt import MoEConfig, MoELayer, routes
from moe_rt.errors import MoeRtError
from moe_rt.parallel import prepare, shard_experts
from moe_rt.routes.file import Routes

H, F, E, K, T = 16, 24, 8, 2, 12
KINDS = {name: options for name, options in FAMILY.items() if name != "softmax groups"} | {
    "groups": {"num_groups": 4, "topk_groups": 2}, "deepseek": {**FAMILY["deepseek"], "num_groups": 2, "topk_groups": 1}
}  # fmt: skip


class Mixed(nn.Module):
    """Dense layers between mixtures; `how` is None, or the kind of checkpointing around each pair of layers."""

    def __init__(self, group: Any, how: str | None = None, **options: Any) -> None:
        super().__init__()
        sizes = dict(hidden=H, intermediate=F, num_experts=E, num_topk=K, num_max_tokens_per_rank=2 * T)
        config = MoEConfig(**{**sizes, "aux_loss_coef": 0.1, "z_loss_coef": 0.01, **options})
        self.dense = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.moe = nn.ModuleList(MoELayer(config, group) for _ in range(2))
        self.how = how
        drawn = torch.Generator().manual_seed(3)  # ranks may be threads, which share torch's own
        for name, p in self.named_parameters():
            rows = E if ".experts." in name else len(p)
            own = list(self.moe[0].expert_ids) if ".experts." in name else slice(None)
            local = p.data.to_local() if isinstance(p.data, DTensor) else p.data
            local.copy_(torch.randn(rows, *p.shape[1:], generator=drawn)[own] * p.shape[-1] ** -0.5)
        for layer in self.moe:
            if layer.router.balance_bias is not None:
                layer.router.balance_bias.copy_(torch.linspace(-0.3, 0.3, E))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for i in range(2):
            part = functools.partial(self.part, i)
            if self.how is not None:
                x, loss = checkpoint(part, x, use_reentrant=self.how == "reentrant")
            else:
                x, loss = part(x)
            losses.append(loss)
        return x, torch.stack(losses).sum()

    def part(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        y, aux = self.moe[i](self.dense[i](x).tanh())
        return x + y, aux.loss

    def close(self) -> None:
        for layer in self.moe:
            layer.buffer.close()


def batch(rank: int, number: int = 0, tokens: int = T) -> Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(100 * number + rank)).requires_grad_()


def step(model: nn.Module, xs: list[Tensor], order: list[int] | None = None, together: bool = False) -> list[Tensor]:
    """Run all micro-batches, then their backwards in this order, or one of their sum; return losses and gradients."""
    torch.manual_seed(0)  # of jitter
    model.zero_grad()
    losses = []
    for x in xs:
        x.grad = None
        out, aux = model(x)
        losses.append((out.square() * torch.linspace(0.5, 1.5, H)).sum() + aux)
    if together:
        torch.stack(losses).sum().backward()
    for i in () if together else order or range(len(xs)):
        losses[i].backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(loss.detach() for loss in losses), *(x.grad.clone() for x in xs), *grads]


def rank_of(group: Any) -> int:
    if group is None:
        return 0
    return int(group.rank if isinstance(group.rank, int) else group.rank())


def rerouted(model: Mixed) -> None:
    """Make the routers choose others, by weights that this rank's peers get also."""
    with torch.no_grad():
        for layer in model.moe:
            layer.router.weight.add_(torch.randn(E, H, generator=torch.Generator().manual_seed(5)))


def same_bits(group: Any, options: dict[str, Any], how: str | None, order: list[int] | None, together: bool) -> None:
    """A replayed step equals the recorded one; with other routers it visits the recorded experts."""
    model = Mixed(group, how, **options)
    xs = [batch(rank_of(group), n) for n in range(3)]
    with routes.record(model) as recorded:
        expected = step(model, xs, order, together)
    assert recorded.routes().topk_idx.shape == (3 * T, 2, K)
    with routes.replay(recorded, model), routes.record(model) as again:
        got = step(model, xs, order, together)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(again.routes().topk_idx, recorded.routes().topk_idx)
    rerouted(model)
    with routes.record(model) as others:
        step(model, xs, order, together)
    assert not torch.equal(others.routes().topk_idx, recorded.routes().topk_idx)
    replay = routes.replay(recorded, model)
    with replay, routes.record(model) as again:
        plain = step(model, xs, order, together)
    assert torch.equal(again.routes().topk_idx, recorded.routes().topk_idx)
    model.how = None  # without checkpointing, so with nothing to match
    with routes.replay(recorded, model):
        wanted = step(model, xs, order, together)
    assert all(torch.equal(a, b) for a, b in zip(wanted, plain, strict=True))
    model.close()


def late_backward(group: Any, how: str) -> None:
    """The backward may come after the block, and recomputes what the block replayed."""
    model = Mixed(group, how)
    x = batch(rank_of(group))
    with routes.record(model) as recorded:
        step(model, [x])
    rerouted(model)
    with routes.replay(recorded, model):
        expected = step(model, [x])
    model.zero_grad()
    x.grad = None
    with routes.replay(recorded, model):
        out, aux = model(x)
    ((out.square() * torch.linspace(0.5, 1.5, H)).sum() + aux).backward()
    assert torch.equal(x.grad, expected[1])
    model(x)  # and a forward after it chooses again
    model.close()


def saved(group: Any, path: str, tokens: list[int]) -> list[Tensor]:
    model = Mixed(group)
    with routes.record(model) as recorded:
        out = [model(batch(rank_of(group), n, tokens[rank_of(group)]))[0].detach() for n in range(2)]
    recorded.save(path)
    model.close()
    return out


def own_parts(group: Any, path: str, tokens: list[int]) -> Routes:
    """Replay a recording's routes, and this rank's part of a file, with other routers; return the former."""
    model = Mixed(group)
    xs = [batch(group.rank, n, tokens[group.rank]) for n in range(2)]
    with routes.record(model) as recorded:
        for x in xs:
            model(x)
    rerouted(model)
    for given in (recorded.routes(), routes.load(path).of(rank=group.rank)):
        assert given.of_rank == group.rank
        with routes.replay(given, model), routes.record(model) as again:
            for x in xs:
                model(x)
        assert torch.equal(again.routes().topk_idx, recorded.routes().topk_idx)
    model.close()
    return recorded.routes()


def replayed_elsewhere(group: Any, path: str, size: int) -> list[Tensor]:
    """Replay what `size` ranks recorded, with other routers: rank r takes its part of their tokens."""
    model = Mixed(group)
    xs = [torch.cat([batch(r, n) for r in range(size)]).chunk(group.size)[group.rank] for n in range(2)]
    with routes.record(model) as live:
        for x in xs:
            model(x)
    rerouted(model)
    with routes.replay(path, model), routes.record(model) as again:
        for x in xs:
            model(x)
    assert torch.equal(again.routes().topk_idx, live.routes().topk_idx)
    model.close()
    return [again.routes().topk_idx]


def refused(group: Any, changed: Routes, kind: str, tokens: list[int], forwards: int) -> str:
    """Return the type and text of the error of a replay."""
    model = Mixed(group, num_topk=3) if kind == "K" else Mixed(group)
    try:
        with routes.replay(changed, model):
            for n in range(forwards):
                model(batch(group.rank, n, tokens[group.rank]))
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.close()
    return ""


def wrapped(group: Any, how: str) -> None:
    """A replayed step under DistributedDataParallel or FSDP2, with activation checkpointing, has the same bits."""
    experts = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("efsdp", "ep"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    inner = Mixed(experts["ep"] if how == "fsdp" else None, "non-reentrant")
    if how == "fsdp":
        shard_experts(inner, experts["efsdp"])
        for part in (*inner.dense, inner):
            fully_shard(part, mesh=mesh)
        model: nn.Module = inner
    else:
        model = DistributedDataParallel(prepare(inner))
    xs = [batch(dist.get_rank(), n) for n in range(2)]
    with routes.record(model) as recorded:
        expected = step(model, xs)
    assert recorded.names == ("moe.0", "moe.1")
    with routes.replay(recorded, model):
        got = step(model, xs)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (a, b)))
    with torch.no_grad():
        for layer in inner.moe:
            layer.router.weight.neg_()
    with routes.replay(recorded, model), routes.record(model) as again:
        step(model, xs)
    assert torch.equal(again.routes().topk_idx, recorded.routes().topk_idx)
    inner.close()


def frozen(group: Any, tokens: list[int]) -> None:
    """Routers without gradients replay; a rank without tokens has as many micro-batches as its peers."""
    model = Mixed(group)
    for layer in model.moe:
        layer.router.requires_grad_(False)
    xs = [batch(group.rank, n, tokens[group.rank]) for n in range(2)]
    with routes.record(model) as recorded:
        expected = step(model, xs)
    with routes.replay(recorded, model):
        got = step(model, xs)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert recorded.routes().num_micro_batches == 2
    model.close()
