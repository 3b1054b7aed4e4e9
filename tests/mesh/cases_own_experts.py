"""Functions that ranks run in the tests of a user's experts, and of adapters around experts."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.nn.part import Part
from moe_rt.ops.grouped import grouped_linear
from moe_rt.parallel import expert_parameters, own_experts, prepare, whole_state_dict

H, E, TOKENS = 16, 4, 48


class Listed(nn.Module):
    """One module for each expert of this rank."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        every = [nn.Linear(H, H) for _ in range(E)]
        self.each = nn.ModuleList(every[i] for i in ids)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        rows = [expert(x[a:b]) for expert, a, b in zip(self.each, ends, ends[1:], strict=False)]
        return torch.cat(rows)


class Stacked(nn.Module):
    """One tensor for all experts of this rank."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, H)[ids] / H**0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        return torch.cat([x[a:b] @ w for w, a, b in zip(self.weight, ends, ends[1:], strict=False)])


class Grouped(Stacked):
    """One tensor, multiplied by an op that compilers keep."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, offs, transposed=True)


class Model(nn.Module):
    def __init__(self, group: Any, kind: type[nn.Module], marked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes: Any = dict(num_max_tokens_per_rank=TOKENS, hidden=H, num_topk=2, num_experts=E, dtype=torch.float32)
        self.buffers_of_rows = [Buffer(group, **sizes)]
        [buffer] = self.buffers_of_rows
        self.before, self.router = nn.Linear(H, H), nn.Linear(H, E)
        self.experts = kind(buffer.spec.placement.local_experts(buffer.rank))
        if marked:
            own_experts(self.experts, buffer)

    def forward(self, x: Tensor) -> Tensor:
        [buffer] = self.buffers_of_rows
        x = self.before(x)
        topk_weights, topk_idx = self.router(x).softmax(-1).topk(2)
        recv_x, recv_weights, handle = buffer.dispatch(x, topk_idx, topk_weights)
        return buffer.combine(self.run_experts(recv_x, handle.offs), recv_weights, handle)

    def run_experts(self, x: Tensor, offs: Tensor) -> Tensor:
        y: Tensor = self.experts(x, offs)
        return y

    def close(self) -> None:
        self.buffers_of_rows[0].close()


def steps(model: nn.Module, rank: int, world: int, num: int = 3) -> list[float]:
    """Return norms and global losses of some steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    seen = []
    for step in range(num):
        x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if world > 1:
            dist.all_reduce(total)
        seen += [norm.item(), total.item() / world]
    return seen


def trained(group: Any, kind: type[nn.Module], made: type[Model] = Model, ep: Any = None) -> list[float]:
    """Return the steps of a model over `group`, whose experts are spread over `ep`, a part of it, if given."""
    model = made(ep or group, kind)
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    try:
        return steps(model if world == 1 else DistributedDataParallel(prepare(model)), rank, world)
    finally:
        model.close()


def unmarked(group: Any, how: str) -> None:
    model = Model(group, Listed, marked=False)
    try:
        wrapped = DistributedDataParallel(model, find_unused_parameters=how == "unused")
        if how == "later":  # a forward without gradients proves nothing
            with torch.no_grad():
                wrapped(torch.zeros(0, H))
        steps(wrapped, group.rank(), group.size(), 1)
    finally:
        model.close()


def refused(group: Any, how: str) -> None:
    layer = MoELayer(MoEConfig(hidden=H, intermediate=8, num_experts=E, num_topk=2, num_max_tokens_per_rank=4), group)
    try:
        own_experts(layer if how == "layer" else layer.experts, layer.buffer)
    finally:
        layer.buffer.close()


def of_threads(group: Any) -> None:
    Model(group, Listed)


def saved_on_one(group: Any, kind: type[nn.Module], whole: bool) -> tuple[list[float], list[float]]:
    """Return the steps of a model, and of another that loaded the first rank's file of it."""
    model = DistributedDataParallel(prepare(Model(group, kind)))
    rank, world = group.rank(), group.size()
    steps(model, rank, world, 1)
    file = io.BytesIO()
    torch.save(whole_state_dict(model) if whole else model.state_dict(), file)
    files = [None] * world
    dist.all_gather_object(files, file.getvalue())
    other = DistributedDataParallel(prepare(Model(group, kind)))
    try:
        other.load_state_dict(torch.load(io.BytesIO(files[0])))
        if not whole:  # the other rank raised, and would not take part in steps
            return [], []
        return steps(model, rank, world, 2), steps(other, rank, world, 2)
    finally:
        model.module.close()
        other.module.close()


def remade(group: Any) -> list[bool]:
    """Replace parameters of a user's experts, one of which is frozen, and freeze another before they are marked."""
    model = Model(group, Listed, marked=False)
    [buffer] = model.buffers_of_rows
    model.experts.each[0].bias.requires_grad_(False)
    own_experts(model.experts, buffer)
    kind, found = type(model.experts), []
    try:
        for child in model.experts.each:
            child.weight = nn.Parameter(child.weight.detach().to_local().clone())
        model(torch.ones(2, H))
        found = [isinstance(p, Part) for p in model.experts.parameters()]
        return [*found, (kind.__module__, kind.__name__) == (Listed.__module__, "Listed")]
    finally:
        model.close()


def compiled(group: Any) -> tuple[Tensor, Tensor]:
    """Return the experts' outputs, eager and compiled to one graph."""
    model = prepare(Model(group, Grouped))
    x, offs = torch.randn(8, H), torch.tensor([3, 8], dtype=torch.int32)
    experts: Any = model.experts
    try:
        eager = experts(x, offs)
        return eager.detach(), torch.compile(experts, fullgraph=True, backend="eager")(x, offs).detach()
    finally:
        model.close()


def copied(group: Any) -> tuple[list[float], list[float]]:
    model = prepare(Model(group, Listed))
    again = copy.deepcopy(model)
    try:
        return tuple(steps(DistributedDataParallel(m), group.rank(), group.size(), 2) for m in (model, again))
    finally:
        model.close()


class Adaptable(nn.Module):
    def __init__(self, group: Any, layout: str, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes: Any = dict(hidden=H, intermediate=8, num_experts=E, num_topk=2, num_max_tokens_per_rank=TOKENS)
        self.before, self.moe = nn.Linear(H, H), MoELayer(MoEConfig(weight_layout=layout, **sizes, **changes), group)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(self.before(x))[0]
        return out


def adapted(group: Any, layout: str, late: bool = False, has_copies: bool = False) -> list[float]:
    """Train PEFT's adapters on the weights of experts; each rank has those of its experts."""
    base = Adaptable(ep_group() if has_copies else group, layout)
    layer = base.moe
    inputs, down = layer.config.weight_names
    lora = peft.LoraConfig(
        r=2, target_modules=["before"], target_parameters=[f"moe.experts.{name}" for name in (*inputs, down)]
    )
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    if late:
        prepare(base)
    model: Any = peft.get_peft_model(base, lora)
    _draw_adapters(model, layer.expert_ids)
    try:
        if world > 1 and not late:
            prepare(model)
            assert all(isinstance(p, Part) for p in expert_parameters(model)), "before a wrapper or optimizer sees them"
        return steps(model if world == 1 else DistributedDataParallel(model), rank, world)
    finally:
        layer.buffer.close()


@torch.no_grad()
def _draw_adapters(model: nn.Module, ids: list[int]) -> None:
    """Draw adapters that depend only on the expert. PEFT has A as [E r, in] and B as [out, r E], experts innermost."""
    for name, p in model.named_parameters():
        if "lora_" not in name:
            continue
        of_experts = ".experts." in name
        held = len(ids) if of_experts else 1
        first = "lora_A" in name
        rank_and_held, other = (p.shape[0], p.shape[1]) if first else (p.shape[1], p.shape[0])
        r = rank_and_held // held
        drawn = torch.randn((E if of_experts else 1), r, other, generator=torch.Generator().manual_seed(len(name))) / 4
        drawn = drawn[ids] if of_experts else drawn
        p.copy_(drawn.flatten(0, 1) if first else drawn.permute(2, 1, 0).flatten(1))


class Pair(nn.Module):
    """Two grouped matrices of equal size and a bias, multiplied by an op that compilers keep."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(E, H, H)[ids] / H**0.5) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(len(ids), H))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        x = grouped_linear(x, self.first, offs, self.bias, transposed=True)
        return grouped_linear(x.relu(), self.second, offs, transposed=True)


class Tied(Pair):
    """Both matrices are one."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(ids)
        self.second = self.first


class Checkpointed(Pair):
    """A pair whose second product is checkpointed in the reentrant way, which runs it again outside of the forward."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        x = grouped_linear(x, self.first, offs, self.bias, transposed=True)
        run = partial(checkpoint, use_reentrant=True)
        return run(lambda x: grouped_linear(x.relu(), self.second, offs, transposed=True), x)


class Parted(nn.ModuleList):
    """A module without a forward, whose child has one."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__([Pair(ids)])


class Outside(Model):
    """A model that runs its experts, which are a pair or have one, without their forward."""

    def run_experts(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.experts[0](x, offs) if isinstance(self.experts, Parted) else Pair.forward(self.experts, x, offs)


def ep_group() -> Any:
    """Return this rank's group of two of four ranks: the other two have copies of its experts."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep")).get_group("ep")


def next_to_copies(group: Any, kind: type[nn.Module], which: list[int]) -> list[dict[str, Tensor]]:
    """Return gradients of a model's experts: eager on all ranks, and then compiled on some, whose copies are eager."""
    ep, results = ep_group(), []
    for ranks in ([], which):
        wrapped: Any = DistributedDataParallel(prepare(Model(ep, kind)))
        model = wrapped.module
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if group.rank() in ranks else model
        x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(group.rank()))
        run(x).square().mean().backward()
        results.append({name: p.grad.as_subclass(Tensor) for name, p in model.experts.named_parameters()})
        model.close()
    return results


def trained_next_to_copies(group: Any, kind: type[nn.Module], made: type[Model] = Model) -> list[float]:
    """Return the steps of two groups of two ranks with the same experts."""
    return trained(group, kind, made, ep_group())


class LowRank(nn.Module):
    """Frozen experts, and a trained change of low rank for each, written by hand (LoRA)."""

    def __init__(self, experts: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        self.experts = experts.requires_grad_(False)
        first, second = torch.randn(2, E, H, 2, generator=torch.Generator().manual_seed(7)) / 4
        self.first, self.second = nn.Parameter(first[list(ids)]), nn.Parameter(second[list(ids)])

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        low = grouped_linear(x, self.first, offs, transposed=True)
        y: Tensor = self.experts(x, offs) + grouped_linear(low, self.second, offs)
        return y


def adapted_by_hand(group: Any, has_copies: bool, how: str) -> list[float]:
    """Train adapters that are written by hand, around the experts of a layer."""
    model: Any = Adaptable(ep_group() if has_copies else group, "hf", num_chunks=2 if how == "chunks" else 1)
    model.moe.experts = LowRank(model.moe.experts, model.moe.expert_ids)
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    try:
        if world > 1:
            model = DistributedDataParallel(prepare(model))
        if how == "compiled":
            model.compile(backend="aot_eager")
        return steps(model, rank, world)
    finally:
        (model.module if world > 1 else model).moe.buffer.close()
