"""Functions that ranks run in the tests of Transformers models: distributed, and in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from integrations.cases_transformers_experts import relative
from integrations.transformers_models import VOCABULARY
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_rt.integrations.transformers as integration
from moe_rt.buffer import pool
from moe_rt.group.rendezvous import StoreRendezvous
from moe_rt.integrations.transformers import MoeRtEP


def load(path: str, dtype: torch.dtype = torch.float32, **distributed: Any) -> Any:
    """Load the saved model: whole, or distributed with the fields of DistributedConfig."""
    config = DistributedConfig(ep_implementation="moe_rt", **distributed) if distributed else None
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config)


def tokens_of(batch: int, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(7 + batch)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def objective(logits: Tensor) -> Tensor:
    """Sum over tokens. A mean would not give a batch without tokens a gradient of zero."""
    return (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum() / 100


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def experts_modules(model: nn.Module) -> list[MoeRtEP]:
    """Return the implementation of every layer, from the closure that Transformers made its forward."""
    cells = [m.forward.__closure__ for m in model.modules() if getattr(m.forward, "__name__", "") == "ep_forward"]
    return [c.cell_contents for closure in cells for c in closure or () if isinstance(c.cell_contents, MoeRtEP)]


def live_buffers() -> int:
    gc.collect()
    return len(pool._leased)


def equals_one_process(
    group: Any,
    path: str,
    shapes: list[tuple[int, int]],
    distributed: dict[str, int],
    check_tokens: bool = True,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Compare logits, every gradient and greedy tokens; shapes[i] is batch x length of data-parallel rank i."""
    model, reference = load(path, **distributed), load(path)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    num_batches = distributed.get("fsdp_size", 1)
    mine = dist.get_rank(group) * num_batches // dist.get_world_size(group)
    logits = model(tokens_of(mine, shapes[mine])).logits
    objective(logits).backward()
    for i, shape in enumerate(shapes[:num_batches]):
        expected = reference(tokens_of(i, shape)).logits
        (objective(expected) / num_batches).backward()
        if i == mine:
            difference = float((logits - expected).detach().abs().max())
            assert difference == difference
    expected_grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    # Attention over a single token has only rounding errors as gradient of queries and keys: no relative error exists.
    noise = 1e-7 * max(float(grad.norm()) for grad in expected_grads.values())
    grads = {
        name: relative(whole(p.grad), expected_grads[name])
        for name, p in model.named_parameters()
        if name in expected_grads and float(expected_grads[name].norm()) > noise
    }
    result = {"logits": difference, "grads": grads, "layers": len(experts_modules(model)), "buffers": live_buffers()}
    if check_tokens:
        prompt = tokens_of(mine, shapes[mine])
        options = dict(max_new_tokens=4, do_sample=False)
        result["same_tokens"] = torch.equal(model.generate(prompt, **options), reference.generate(prompt, **options))
    return result


def saves(group: Any, path: str, out: str, distributed: dict[str, int]) -> None:
    load(path, **distributed).save_pretrained(out)


def grows(group: Any, path: str) -> dict[str, Any]:
    """Run two forwards, the second too large on one rank only, then both backwards; count live buffers after each."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model, reference = load(path, fsdp_size=world, ep_size=world), load(path)
    shapes = [[(1, 5), (1, 3)], [(1, 2), (2, 100)]]
    losses, alive = [], []
    for step in shapes:
        losses.append(objective(model(tokens_of(rank, step[rank])).logits))
        alive.append(live_buffers())
    sum(losses).backward()
    losses.clear()
    alive.append(live_buffers())
    for step in shapes:
        for r, shape in enumerate(step):
            (objective(reference(tokens_of(r, shape)).logits) / world).backward()
    parameters = dict(reference.named_parameters())
    worst = max(relative(whole(p.grad), parameters[name].grad) for name, p in model.named_parameters())
    sizes = {pool._size(b) for b in pool._leased.values()}
    return {"grads": worst, "alive": alive, "sizes": sizes}


def growing_by_comparing(group: Any, path: str) -> dict[str, Any]:
    """Compare sizes before each dispatch, as CUDA ranks do, so that no refusal is needed."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model, reference = load(path, fsdp_size=world, ep_size=world), load(path)
    shapes = [[(1, 5), (1, 3)], [(1, 2), (2, 100)], [(1, 4), (1, 1)]]
    differences = []
    with torch.no_grad():
        for step in shapes:
            tokens = tokens_of(rank, step[rank])
            differences.append(float((model(tokens).logits - reference(tokens).logits).abs().max()))
            growing = experts_modules(model)[0]._buffer
            assert growing is not None
            growing.compares_each_call = True
    return {"difference": max(differences), "buffers": live_buffers()}


@contextmanager
def configured(**options: Any) -> Iterator[None]:
    integration.configure(**options)
    try:
        yield
    finally:
        integration.configure()


def fixed_size(group: Any, path: str) -> dict[str, Any]:
    """Return moe_rt's collectives in a forward after the first, and the error for too many tokens."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with configured(num_max_tokens_per_rank=8):
        model = load(path, fsdp_size=world, ep_size=world)
        model(tokens_of(rank, (1, 8)))
        calls: list[str] = []
        gather, reduce = StoreRendezvous.all_gather, pool.dist.all_reduce
        StoreRendezvous.all_gather = lambda *a: calls.append("all_gather") or gather(*a)
        pool.dist.all_reduce = lambda *a: calls.append("all_reduce") or reduce(*a)
        try:
            model(tokens_of(rank, (1, 5 + rank)))
            raised = ""
            with torch.no_grad():
                try:
                    model(tokens_of(rank, (1, 8 + rank)))
                except Exception as error:
                    raised = f"{type(error).__name__}: {error}"
        finally:
            StoreRendezvous.all_gather, pool.dist.all_reduce = gather, reduce
    return {"calls": calls, "raised": raised}


def configured_differently(group: Any, path: str) -> str:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with configured(num_max_tokens_per_rank=None if rank else 32):
        model = load(path, fsdp_size=world, ep_size=world)
        try:
            with torch.no_grad():
                model(tokens_of(rank, (1, 4)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def finite_with_poisoned_memory(group: Any, path: str, experts_implementation: str | None) -> list[bool]:
    """Run two steps in which every fresh tensor starts as NaN; return whether gradients and parameters are finite."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = load(path, fsdp_size=world, ep_size=world)
    if experts_implementation is not None:
        model.set_experts_implementation(experts_implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    finite = []
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for step in range(2):
            objective(model(tokens_of(rank + step, (1, 1 + 3 * rank))).logits).backward()
            optimizer.step()
            finite += [bool(whole(t).isfinite().all()) for p in model.parameters() for t in (p, p.grad)]
            optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    return finite


def refusal_of_transformers(group: Any, path: str, distributed: dict[str, Any]) -> str:
    try:
        load(path, **distributed)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


EVALUATIONS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode and autocast": lambda: both(torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)),
}


@contextmanager
def both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


_expected: dict[str, dict[str, Tensor]] = {}  # gradients without evaluation, which every way of evaluating shares


def _gradients(path: str, distributed: dict[str, int], evaluation: str | None) -> dict[str, Tensor]:
    tokens = tokens_of(0, (48, 64))  # rows to the experts exceed 1 MiB: recycled memory
    model = load(path, **distributed)
    for _ in range(2):
        if evaluation:
            with EVALUATIONS[evaluation]():
                assert bool(model.eval()(tokens).logits.isfinite().all())
        objective(model.train()(tokens).logits).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def trains_after_evaluation(group: Any, path: str, distributed: dict[str, int], evaluation: str) -> list[str]:
    """Return the names of gradients of two training steps that differ if an evaluation precedes each."""
    key = str((path, distributed))
    if key not in _expected:
        _expected[key] = _gradients(path, distributed, None)
    expected, got = _expected[key], _gradients(path, distributed, evaluation)
    assert expected.keys() == got.keys()
    assert any("experts" in name for name in got)
    return [name for name, grad in got.items() if not torch.equal(grad, expected[name])]
