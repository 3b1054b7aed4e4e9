"""Optimizers that combine several elements do with parts what they do in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from replicas.cases_replicas import backward, local, loss_of, net, same_on_all, train, trained, whole
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import swa_utils

from moe_rt.parallel import clip_grad_norm_ as own_clip
from moe_rt.parallel import prepare


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as commonly written: climb by rho along the gradient, and step from there."""

    def __init__(self, params: Any, rho: float = 0.5, adaptive: bool = False) -> None:
        super().__init__(params, dict(rho=rho, adaptive=adaptive))
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = self.grad_norm()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def grad_norm(self) -> Tensor:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


class Lamb(torch.optim.Optimizer):
    """Steps by each tensor's norm over that of its update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                moment.mul_(0.9).add_(p.grad, alpha=0.1)
                update = moment + 1e-3 * p
                p.add_(update, alpha=-1e-2 * float(p.norm() / update.norm()))


class Rms(torch.optim.Optimizer):
    """Clips each update by its root mean square, as the Adafactor of Transformers does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @staticmethod
    def _rms(tensor: Tensor) -> Tensor:
        return tensor.norm(2) / (tensor.numel() ** 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / self._rms(p.grad).clamp(min=1e-4), alpha=-1e-3)


class GradMode(torch.optim.Optimizer):
    """Steps by the norm of all gradients while gradients are recorded, as optimizers that work on `data` do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                total += p.grad.data.abs().sum().item() + torch.dot(p.grad.flatten(), p.data.flatten()).item() ** 2
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-0.1 / total)
        return loss


MAKERS: dict[str, Callable[[Any], Any]] = {
    # eps is large because AdamW's first steps are otherwise the signs of gradients, rounding included.
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.3, foreach=False),
    "adafactor foreach": lambda params: torch.optim.Adafactor(params, lr=0.3, foreach=True),
    "sam": Sam,
    "lamb": Lamb,
    "rms": Rms,
    "grad mode": GradMode,
}


def trains(group: Any, name: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    return trained(group, MAKERS[name], **changes)


def trains_outside(group: Any, name: str) -> tuple[float, dict[str, Tensor]]:
    """Return the step size that the optimizer finds, and all weights."""
    if name == "prodigy":
        from prodigyopt import Prodigy as Outside
    else:
        from dadaptation import DAdaptAdam as Outside
    found: list[Any] = []
    weights = trained(group, lambda params: found.append(Outside(params, lr=1.0)) or found[0])
    return found[0].param_groups[0]["d"], weights


def refused(group: Any, name: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with net(group) as model:
        wrapped = DistributedDataParallel(model)
        before = local(model.experts.down_proj)
        if name == "zero":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        else:
            params = model.parameters() if name == "lbfgs" else model.experts.parameters()
            optimizer = torch.optim.LBFGS(params, lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(wrapped, group)

        closure()
        try:
            optimizer.step(closure)
        finally:
            assert torch.equal(local(model.experts.down_proj), before)


def clipped(group: Any, how: str) -> tuple[float, float]:
    """Return torch's and moe_rt's norm with rank 1's experts frozen, or with only experts trained; also of a list."""
    with net(group, prepared=False) as model:
        if "only experts" in how:
            model.requires_grad_(False)
        if group.rank() == 1 and "frozen" in how:
            model.experts.requires_grad_(False)
        elif "only experts" in how:
            model.experts.requires_grad_(True)
        prepare(model)
        wrapped = model if "only experts" in how else DistributedDataParallel(model)
        loss = loss_of(wrapped, 0, group.rank(), group.size())
        if loss.requires_grad:
            loss.backward()
        if "list" in how:
            theirs = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach="each" in how)
        else:
            theirs = clip_grad_norm_(model.parameters(), 1e9, foreach=True if "each" in how else None)
        return float(theirs), float(own_clip(model, 1e9))


def closures(group: Any, kind: str) -> bool:
    """A closure or a hook that computes a norm on one rank only does not wait for other ranks."""
    with net(group) as model:
        wrapped = DistributedDataParallel(model)
        optimizer = GradMode(model.parameters()) if kind == "grad mode" else torch.optim.SGD(model.parameters(), lr=0.1)

        def look(*_: Any) -> None:
            others = mock.patch("moe_rt.nn.part_reductions._all_reduce", side_effect=AssertionError("waits for others"))
            if group.rank() == 0:
                with others:
                    assert float(model.experts.down_proj.norm()) > 0

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = backward(wrapped, group)
            look()
            return loss

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        optimizer.step(functools.partial(closure) if kind == "partial" else closure)
        return same_on_all(group, model.a.weight)


def compiled(group: Any) -> bool:
    """A compiled Adafactor keeps copies equal; its norms inside the graph are those of plain tensors."""
    with net(group) as model:
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        backward(DistributedDataParallel(model), group)
        torch.compile(optimizer.step, backend="eager")()
        return same_on_all(group, model.a.weight)


def averaged(group: Any) -> dict[str, Tensor]:
    """Return an average of weights."""
    with net(group, group is not None) as model:
        average = swa_utils.AveragedModel(model)
        wrapped = model if group is None else DistributedDataParallel(model)
        for steps in (1, 2):
            train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), group, steps)
            average.update_parameters(model)
        return whole(average.module)


def accumulated(group: Any) -> dict[str, Tensor]:
    """Return weights after a step by the gradients of two micro-batches."""
    with net(group, group is not None) as model:
        wrapped: Any = model if group is None else DistributedDataParallel(model)
        with contextlib.nullcontext() if group is None else wrapped.no_sync():
            backward(wrapped, group, 0)
        backward(wrapped, group, 1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return whole(model)
