"""Plain dense experts of every kind and layout, and functions that ranks run with layers of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rt import MoEConfig, MoELayer
from moe_rt.nn.experts import ExpertsConfig

# Every gated kind; GPT-OSS's is clamped, biased, transposed and interleaved.
KINDS: list[ExpertsConfig] = [
    *(
        ExpertsConfig(activation=a, weight_layout=layout, biases=b)
        for a in ("swiglu", "geglu", "geglu_tanh", "relu2", "clamped_swiglu")
        for layout in ("hf", "transposed", "split")
        for b in (False, True)
    ),
    ExpertsConfig(activation="clamped_swiglu", weight_layout="transposed", biases=True, interleaved=True),
    ExpertsConfig(activation="clamped_swiglu", biases=True, interleaved=True, swiglu_alpha=1.5, swiglu_limit=0.6),
    ExpertsConfig(activation="swiglu", interleaved=True),
]


def name_of(config: ExpertsConfig) -> str:
    flags = [name for name in ("biases", "interleaved") if getattr(config, name)]
    return "-".join([config.activation, config.weight_layout, *flags])


def dense_expert(x: Tensor, weights: dict[str, Tensor], config: ExpertsConfig) -> Tensor:
    """Apply one expert to all of x; its weights have no expert dimension."""

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = weights[name] if config.weight_layout == "transposed" else weights[name].T
        return rows @ weight + weights.get(f"{name}_bias", 0)

    if config.weight_layout == "split":
        first, down = linear(x, "w1"), "w2"
        up = linear(x, "w3") if config.activation != "relu2" else first
    else:
        h, down = linear(x, "up_proj" if config.activation == "relu2" else "gate_up_proj"), "down_proj"
        half = h.shape[1] // 2
        first, up = (h[:, ::2], h[:, 1::2]) if config.interleaved else (h[:, :half], h[:, half:])
        if config.activation == "relu2":
            first = h
    match config.activation:
        case "swiglu":
            y = first * torch.sigmoid(first) * up
        case "geglu":
            y = 0.5 * first * (1 + torch.erf(first / 2**0.5)) * up
        case "geglu_tanh":
            y = F.gelu(first, approximate="tanh") * up
        case "relu2":
            y = torch.where(first > 0, first * first, 0)
        case "clamped_swiglu":
            limit = torch.full_like(up, config.swiglu_limit)
            gate, up = torch.minimum(first, limit), torch.maximum(torch.minimum(up, limit), -limit)
            y = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
    return linear(y, down)


def layer_config(**changes: Any) -> MoEConfig:
    fields: dict[str, Any] = dict(hidden=16, intermediate=24, num_experts=8, num_topk=3, num_max_tokens_per_rank=12)
    return MoEConfig(**{**fields, **changes})


GPT_OSS = dict(topk_before_softmax=True, router_bias=True, activation="clamped_swiglu", weight_layout="transposed",
               biases=True, interleaved=True)  # fmt: skip
DEEPSEEK = dict(score_func="sigmoid", route_scale=2.5, num_groups=4, topk_groups=2, balance_bias=True,
                shared_intermediate=20, aux_loss_coef=1e-3)  # fmt: skip
QWEN2 = dict(norm_topk=False, shared_intermediate=20, shared_gate=True)
NEMOTRON = {**DEEPSEEK, "activation": "relu2"}
TITAN = dict(weight_layout="split", score_func="sigmoid", jitter=0.1)
EXPERT_CHOICE = dict(expert_choice=1.5, norm_topk=False, activation="geglu_tanh")
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": GPT_OSS,
    "deepseek": DEEPSEEK,
    "qwen2": QWEN2,
    "nemotron": NEMOTRON,
    "titan": TITAN,
    "expert choice": EXPERT_CHOICE,
}


def filled_layer(config: MoEConfig, group: Any) -> MoELayer:
    """Fill a layer with values by parameter name and global expert, independent of the ranks; biases are not zero."""
    layer = MoELayer(config, group)
    with torch.no_grad():
        for number, (name, t) in enumerate(sorted(layer.state_dict().items())):
            g = torch.Generator().manual_seed(number)
            if name.startswith("experts."):
                whole = torch.randn(config.num_experts, *t.shape[1:], generator=g)
                t.copy_(0.3 * whole[layer.expert_ids])
            else:
                t.copy_(0.3 * torch.randn(t.shape, generator=g))
    return layer


def rows_of(rank: int, count: int, hidden: int) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(50 + rank))


def run_model(group: Any, num_tokens: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    """Return output and gradients of sum(out * fixed) on this rank; a group of one gets the tokens of all ranks."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    size = group.size if isinstance(group.size, int) else group.size()
    layer = filled_layer(layer_config(num_max_tokens_per_rank=sum(num_tokens), **changes), group).eval()
    mine = range(len(num_tokens)) if size == 1 else [rank]
    x = torch.cat([rows_of(r, num_tokens[r], layer.config.hidden) for r in mine]).requires_grad_()
    out, aux = layer(x)
    (out * torch.linspace(-1, 1, layer.config.hidden)).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    layer.buffer.close()
    return {"out": out.detach(), "x": x.grad, "grads": grads, "ids": layer.expert_ids, "load": aux.tokens_per_expert}


def poisoned_steps(group: Any, changes: dict[str, Any]) -> list[bool]:
    """Run two optimizer steps with NaN in fresh tensors; return whether gradients and parameters are finite."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        layer = filled_layer(layer_config(**changes), group)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        finite = []
        for step in range(2):
            x = rows_of(step, 4, 16).requires_grad_()
            out, aux = layer(x)
            (out.square().mean() + aux.loss).backward()
            grads = [x.grad, *(p.grad for p in layer.parameters())]
            finite.append(all(bool(g.isfinite().all()) for g in grads))
            if layer.config.balance_bias:
                layer.router.update_bias(aux.tokens_per_expert)
            optimizer.step()
            optimizer.zero_grad()
            finite.append(all(bool(t.isfinite().all()) for t in layer.state_dict().values()))
        layer.buffer.close()
        return finite
    finally:
        torch.use_deterministic_algorithms(False)
