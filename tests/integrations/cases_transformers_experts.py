"""Functions that ranks run in the tests of one experts module: Transformers' module, sharded by its plan, and whole."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from integrations.transformers_models import tiny_config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

import moe_rt.integrations.transformers  # noqa: F401  registers "moe_rt"
from moe_rt.integrations import packed_experts

TOPK = 3


def make_experts(family: str, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the first experts module of a tiny model, with the same random weights on every rank."""
    torch.manual_seed(1)
    model = AutoModel.from_config(tiny_config(family), experts_implementation=implementation, dtype=dtype)
    experts = next(m for m in model.modules() if hasattr(m, "_is_expert_parallel"))
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(std=0.3)
    return experts


def spread(experts: nn.Module, group: Any, plan: dict[str, str] | None = None) -> nn.Module:
    """Shard the module over all ranks of the group, as Transformers does without FSDP."""
    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    names = {f"experts.{name}": "grouped_gemm" for name, _ in experts.named_parameters(recurse=False)}
    model = nn.ModuleDict({"experts": experts})
    if hasattr(experts, "post_expert_norm"):
        names["experts.post_expert_norm"] = "replicated_with_grad_allreduce"
    whole_plan = {**names, "experts": "ep_dispatch_experts"} if plan is None else plan
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], whole_plan, ep_implementation="moe_rt")
    return experts


def run(experts: nn.Module, rank: int, num_tokens: int, num_experts: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output, and gradients of the tokens and of the scores that the routing weights come from."""
    g = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(num_tokens, 32, generator=g).to(dtype).requires_grad_()
    scores = torch.randn(num_tokens, num_experts, generator=g).requires_grad_()
    weights, idx = scores.softmax(-1).topk(TOPK, -1)
    out = experts(x, idx, weights.to(dtype))
    (out * torch.linspace(-1, 1, out.shape[1])).sum().backward()
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad}


def equal_whole_module(
    group: Any, family: str, implementation: str, tokens: list[int], as_on_gpu: bool = False, bf16: bool = False
) -> dict[str, float]:
    """Return relative differences. `as_on_gpu` computes on all rows, without reading offs, with NaN in fresh memory."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    dtype = torch.bfloat16 if bf16 else torch.float32
    reference = make_experts(family, "grouped_mm", dtype)
    num_experts = reference.num_experts
    experts = spread(make_experts(family, implementation, dtype), group)
    with ExitStack() as stack:
        if as_on_gpu:
            stack.enter_context(mock.patch.object(packed_experts, "_count", lambda rows, offs: rows.shape[0]))
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = True
        got = run(experts, rank, tokens[rank], num_experts, dtype)
    expected = [run(reference, r, tokens[r], num_experts, dtype) for r in range(size)]
    result = {name: relative(got[name], expected[rank][name]) for name in got}
    whole_grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, p in experts.named_parameters():
        if isinstance(p.grad, DTensor) and p.shape[0] == num_experts:
            result[name] = relative(p.grad.to_local(), whole_grads[name].chunk(size)[rank])
        else:
            result[name] = relative(p.grad, whole_grads[name])
    return result


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    assert bool(a.isfinite().all()), "NaN compares as if it were close"
    scale = b.float().norm()
    return float((a.float() - b.float()).norm() / (scale if scale > 0 else 1)) if a.numel() else 0.0


def refused_plan(group: Any, family: str, without: str) -> str:
    experts = make_experts(family, "grouped_mm")
    names = [name for name, _ in experts.named_parameters() if name != without]
    plan = {**{f"experts.{name}": "grouped_gemm" for name in names}, "experts": "ep_dispatch_experts"}
    try:
        spread(experts, group, plan)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""
