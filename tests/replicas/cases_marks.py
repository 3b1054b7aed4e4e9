"""Ways in which parameters are replaced and changed; after each, a model's experts are still parts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from replicas.cases_replicas import Net, backward, batch, net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize, prune

from moe_rt.nn.part import Part
from moe_rt.parallel import clip_grad_norm_ as own_clip
from moe_rt.parallel import prepare


class Lora(nn.Module):
    """Adds a product of two small matrices to each expert's."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        num_experts, rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(num_experts, rows, 2, generator=generator) * 0.1)
        self.b = nn.Parameter(torch.randn(num_experts, 2, columns, generator=generator) * 0.1)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


def converted(model: Net, flag: Callable[[bool], None], value: bool = True) -> None:
    flag(value)
    try:
        model.double()
        model.float()
    finally:
        flag(not value)


def assigned(model: Net, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    for name, p in list(model.experts.named_parameters()):
        setattr(model.experts, name, make(p))


def emptied(model: Net, meta: bool) -> None:
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    if meta:
        model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(weights)


def data_assigned(model: Net) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def data_set(model: Net) -> None:
    with torch.no_grad():
        for p in model.experts.parameters():
            p.set_(p.detach().clone())


def refreshed(model: Net, how: str) -> None:
    from accelerate.utils import set_module_tensor_to_device

    for name, p in list(model.named_parameters()):
        value = p.detach().clone()
        if how == "meta":
            set_module_tensor_to_device(model, name, "meta")
        set_module_tensor_to_device(model, name, "cpu", value=value)


def swapped_in(model: Net) -> None:
    """Take a parameter out and put it back, as hooks and freezers do."""
    p = model.experts.down_proj
    del model.experts.down_proj
    model.experts.register_parameter("down_proj", nn.Parameter(p.detach()))


WAYS: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda m: None,
    "swap": lambda m: converted(m, torch.__future__.set_swap_module_params_on_conversion),
    "overwrite": lambda m: converted(m, torch.__future__.set_overwrite_module_params_on_conversion),
    "nn.Parameter(p)": lambda m: assigned(m, lambda p: nn.Parameter(p)),
    "nn.Parameter(clone)": lambda m: assigned(m, lambda p: nn.Parameter(p.detach().clone())),
    "type(p)(...)": lambda m: assigned(m, lambda p: type(p)(p.detach().clone(), requires_grad=True)),
    "deepcopied": lambda m: assigned(m, copy.deepcopy),
    "to_empty": lambda m: emptied(m, False),
    "meta": lambda m: emptied(m, True),
    "half": lambda m: m.to(torch.float64).to(torch.float32),
    "requires_grad_": lambda m: m.requires_grad_(False).requires_grad_(True),
    "assign": lambda m: m.load_state_dict({k: t.clone() for k, t in m.state_dict().items()}, assign=True),
    "p.data = ...": data_assigned,
    "set_": data_set,
    "put back": swapped_in,
    "set_module_tensor_to_device": lambda m: refreshed(m, ""),
    "set_module_tensor_to_device meta": lambda m: refreshed(m, "meta"),
    "share_memory": lambda m: m.share_memory(),
}
# These change the set of parameters, so that only norms can be compared.
RESHAPING: dict[str, Callable[[Net], Any]] = {
    "lora": lambda m: parametrize.register_parametrization(m.experts, "down_proj", Lora(m.experts.down_proj)),
    "weight_norm": lambda m: parametrizations.weight_norm(m.experts, "down_proj"),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m.experts, "down_proj"),
    "prune": lambda m: prune.l1_unstructured(m.experts, "down_proj", 0.5),
    "removed": lambda m: (
        parametrize.register_parametrization(m.experts, "down_proj", Lora(m.experts.down_proj)),
        parametrize.remove_parametrizations(m.experts, "down_proj"),
    ),
}


def norms(group: Any, way: str, after: bool) -> tuple[float, float, float, list[str]]:
    """Return norms of gradients by torch, by moe_rt and by hand, and the experts' parameters that are not parts."""
    with net(group, prepared=False) as model:
        change = {**WAYS, **RESHAPING}[way]
        if after:
            prepare(model)
        change(model)
        wrapped = DistributedDataParallel(prepare(model))
        backward(wrapped, group)
        plain = [name for name, p in model.experts.named_parameters() if not isinstance(p, Part)]
        local = torch.stack([p.grad.to_local().norm() for p in model.experts.parameters()]).norm().square()
        dist.all_reduce(local)
        others = [p.grad.norm().square() for name, p in model.named_parameters() if ".experts." not in name]
        by_hand = (local + sum(others)).sqrt()
        return float(clip_grad_norm_(wrapped.parameters(), 1e9)), float(own_clip(model, 1e9)), float(by_hand), plain


def pickled(group: Any) -> list[float]:
    with net(group) as model:
        data = io.BytesIO()
        torch.save(model, data)
        data.seek(0)
        loaded, results = torch.load(data, weights_only=False), []
        for m in (model, prepare(loaded), prepare(copy.deepcopy(model))):
            backward(DistributedDataParallel(m), group)
            results.append(float(clip_grad_norm_(m.parameters(), 1e9)))
        loaded.moe.buffer.close()  # all three share this buffer
        return results


def offloaded(group: Any) -> tuple[float, float]:
    """Return outputs without hooks that load weights when they are needed, and with them."""
    from accelerate import cpu_offload

    with net(group) as model:
        x = batch(0, group.rank(), group.size())
        with torch.no_grad():
            before = model(x)
            cpu_offload(model, execution_device=torch.device("cpu"))
            return float(before.sum()), float(model(x).sum())


def made_empty(group: Any) -> tuple[bool, float, float]:
    """Make a model without memory, and load it."""
    from accelerate import init_empty_weights

    with net(group) as model:
        weights = model.state_dict()
        with init_empty_weights():
            empty = Net(group)
        on_meta = empty.experts.down_proj.is_meta
        empty.load_state_dict(weights, assign=True)
        results = []
        for m in (model, empty):
            backward(DistributedDataParallel(prepare(m)), group)
            results.append(float(clip_grad_norm_(m.parameters(), 1e9)))
        empty.moe.buffer.close()
        return on_meta, *results


def called_with_others(group: Any) -> bool:
    """Gradients of a functional call, whose parameters are plain tensors, equal those of a usual call."""
    with net(group) as model:
        x = batch(0, group.rank(), group.size())
        values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, values, (x,)).square().mean().backward()
        model(x).square().mean().backward()
        return all(torch.allclose(values[name].grad, p.grad) for name, p in model.named_parameters())
