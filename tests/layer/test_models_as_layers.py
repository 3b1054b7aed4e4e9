"""Layers configured as known models: equal to Transformers' blocks, on any number of ranks, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer import cases_kinds as cases
from layer.cases_kinds import MODELS, dense_expert
from support.ranks import Ranks
from torch import Tensor

from moe_rt import MoELayer

MakeRanks = Callable[[str, int], Ranks]
MODELS_OF_TOKENS = {name: changes for name, changes in MODELS.items() if "expert_choice" not in changes}
models = pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
# Compiling one takes ten seconds; the others differ from these in the router's scores, an activation or a gate.
COMPILED = ("deepseek", "gpt-oss", "expert choice")
compiled = pytest.mark.parametrize(
    "changes",
    [pytest.param(c, id=name, marks=[] if name in COMPILED else pytest.mark.sweep) for name, c in MODELS.items()],
)

SIZES = dict(hidden_size=16, num_experts_per_tok=3)
MANY = dict(num_experts=8, moe_intermediate_size=24, **SIZES)
GROUPED = dict(n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, **SIZES)
# moe_rt's names -> Transformers' names, if they differ.
GATE = {"router.": "gate."}
DEEPSEEK_NAMES = {**GATE, "balance_bias": "e_score_correction_bias", "shared_expert": "shared_experts"}


@pytest.mark.parametrize(
    ("module", "block", "config", "theirs", "ours", "names"),
    [
        ("mixtral", "MixtralSparseMoeBlock", "MixtralConfig",
         dict(num_local_experts=8, intermediate_size=24, **SIZES), {}, GATE),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", dict(norm_topk_prob=True, **MANY), {}, GATE),
        ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig",
         dict(num_experts=8, intermediate_size=24, **SIZES), {"norm_topk": False}, GATE),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig",
         dict(shared_expert_intermediate_size=20, **MANY), cases.QWEN2,
         {**GATE, "shared_expert.output_gate": "shared_expert_gate"}),
        ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", dict(moe_intermediate_size=24, **GROUPED),
         {**cases.DEEPSEEK, "shared_intermediate": 24}, DEEPSEEK_NAMES),
        ("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", dict(moe_intermediate_size=24, **GROUPED),
         {**cases.DEEPSEEK, "shared_intermediate": 24}, DEEPSEEK_NAMES),
        ("nemotron_h", "NemotronHMoE", "NemotronHConfig",
         dict(moe_intermediate_size=24, moe_shared_expert_intermediate_size=20, **GROUPED),
         cases.NEMOTRON, DEEPSEEK_NAMES),
        ("gpt_oss", "GptOssMLP", "GptOssConfig", dict(num_local_experts=8, intermediate_size=24, **SIZES),
         cases.GPT_OSS, {}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_equals_the_block_of_transformers(
    module: str, block: str, config: str, theirs: dict[str, Any], ours: dict[str, Any], names: dict[str, str]
) -> None:
    """Output, and gradients of the input and of every parameter, are equal; parameters differ in name only."""
    models = pytest.importorskip("transformers.models")
    package = getattr(models, module)
    reference = getattr(getattr(package, f"modeling_{module}"), block)(getattr(package, config)(**theirs))
    layer = cases.filled_layer(cases.layer_config(**ours), None)

    def renamed(name: str) -> str:
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        return name

    reference.load_state_dict({renamed(name): t for name, t in layer.state_dict().items()})
    x = cases.rows_of(0, 10, 16)[None]
    grads = []
    outs: list[Tensor] = []
    for block_or_layer in (layer, reference):
        rows = x.clone().requires_grad_()
        out = block_or_layer(rows)
        outs.append(out[0] if isinstance(out, tuple) else out)
        (outs[-1] * torch.linspace(-1, 1, 16)).sum().backward()
        grads.append({name: p.grad for name, p in block_or_layer.named_parameters()} | {"x": rows.grad})
    close = dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outs[0], outs[1], **close)
    assert {renamed(name) for name in grads[0]} == set(grads[1])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][renamed(name)], **close)
    layer.buffer.close()


@compiled
def test_compiles_as_one_graph(changes: dict[str, Any]) -> None:
    layer = cases.filled_layer(cases.layer_config(**{**changes, "jitter": 0.0}), None)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = cases.rows_of(0, 8, 16)
    results = []
    for module in (layer, compiled):
        layer.zero_grad()
        out, aux = module(x)
        (out.square().mean() + aux.loss).backward()
        results.append([out.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-5)
    layer.buffer.close()


@models
def test_equals_a_dense_loop(changes: dict[str, Any]) -> None:
    """The layer equals a loop that applies every expert to every token, weighted by the router's weights."""
    layer = cases.filled_layer(cases.layer_config(**changes), None).eval()
    x = cases.rows_of(0, 10, 16)
    idx, weights, _ = layer.router(x)
    expected = torch.zeros_like(x) if layer.shared_expert is None else layer.shared_expert(x)
    for e in range(layer.config.num_experts):
        y = dense_expert(x, {name: p[e] for name, p in layer.experts.named_parameters()}, layer.config)
        expected = expected + ((idx == e) * weights).sum(1, keepdim=True) * y
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)
    layer.buffer.close()


# Expert choice is excluded: experts choose among their own rank's tokens, so the choice depends on the ranks.
@pytest.mark.parametrize("changes", MODELS_OF_TOKENS.values(), ids=MODELS_OF_TOKENS.keys())
@pytest.mark.parametrize("heap", ["threads", "loopback"])
def test_ranks_equal_one_rank(make_ranks: MakeRanks, heap: str, changes: dict[str, Any]) -> None:
    """Output and gradients on any number of ranks equal one rank's; those of shared parameters are sums over ranks."""
    num_tokens = [5, 0, 7]
    (whole,) = make_ranks(heap, 1).run(cases.run_model, num_tokens, changes)
    parts = make_ranks(heap, 3).run(cases.run_model, num_tokens, changes)
    close = dict(rtol=1e-4, atol=1e-5)
    for name in ("out", "x"):
        torch.testing.assert_close(torch.cat([p[name] for p in parts]), whole[name], **close)
    assert torch.equal(sum(p["load"] for p in parts), whole["load"])
    for name, grad in whole["grads"].items():
        if name.startswith("experts."):
            for p in parts:
                torch.testing.assert_close(p["grads"][name], grad[p["ids"]], **close)
        else:
            torch.testing.assert_close(sum(p["grads"][name] for p in parts), grad, **close)


@models
@pytest.mark.parametrize("size", [1, 2])
def test_poisoned_memory_stays_out_of_gradients(make_ranks: MakeRanks, size: int, changes: dict[str, Any]) -> None:
    for finite in make_ranks("shm", size).run(cases.poisoned_steps, changes):
        assert finite == [True] * 4


def test_replay_through_the_layer() -> None:
    layer = cases.filled_layer(cases.layer_config(**cases.DEEPSEEK), None)
    x = cases.rows_of(0, 6, 16)
    out, aux = layer(x)
    layer.router.update_bias(aux.tokens_per_expert * 1000)
    replayed, again = layer(x, topk_idx=aux.topk_idx)
    assert torch.equal(replayed, out)
    assert torch.equal(again.topk_idx, aux.topk_idx)
    layer.buffer.close()


def test_names_in_the_state_dict() -> None:
    names = {}
    for name, changes in {"default": {}, **MODELS}.items():
        layer = MoELayer(cases.layer_config(**changes))
        names[name] = list(layer.state_dict())
        layer.buffer.close()
    assert names["default"] == ["router.weight", "experts.gate_up_proj", "experts.down_proj"]
    shared = [f"shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert names["deepseek"] == ["router.weight", "router.balance_bias", *names["default"][1:], *shared]
    assert names["qwen2"] == [*names["default"], *shared, "shared_expert.output_gate.weight"]
    assert names["titan"] == ["router.weight", "experts.w1", "experts.w3", "experts.w2"]
    weights = [f"experts.{part}_proj{suffix}" for part in ("gate_up", "down") for suffix in ("", "_bias")]
    assert names["gpt-oss"] == ["router.weight", "router.bias", *weights]
    assert names["nemotron"][2:] == ["experts.up_proj", "experts.down_proj", *shared[1:]]
