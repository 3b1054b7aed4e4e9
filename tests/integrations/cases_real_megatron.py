"""Functions that ranks run with the real Megatron-Core: its dispatcher's six steps, and a whole layer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from integrations import (
    cases_megatron,
    fake_triton,  # noqa: F401
)
from integrations.cases_adapters import EXPERTS, HIDDEN, TOPK, rank_and_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_rt.integrations.megatron import MoeRtManager, replace_deepep


def _config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        add_bias_linear=False,
    )


def _dispatcher(group: Any, config: TransformerConfig) -> Any:
    rank, size = rank_and_size(group)
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp, groups.tp_ep = group, None, group
    local = list(range(EXPERTS))[rank * EXPERTS // size : (rank + 1) * EXPERTS // size]
    return token_dispatcher.MoEFlexTokenDispatcher(len(local), local, config, groups)


def equal_dense(group: Any, tokens: list[int], options: dict[str, Any]) -> dict[str, float]:
    """Compare Megatron's dispatcher, built after `replace_deepep` without DeepEP, with a dense layer."""
    replace_deepep(**options)
    dispatcher = _dispatcher(group, _config())
    assert isinstance(dispatcher._comm_manager, MoeRtManager)
    assert dispatcher.check_over_budget() is None
    return cases_megatron.equal_dense(group, tokens, options, dispatcher=dispatcher)


def over_budget(group: Any) -> list[list[bool]]:
    """Run a step over its budget, the rerun without a factor that Megatron starts then, and the next step.

    Return for each what the budget check says, and whether the output is right.
    """
    rank, _ = rank_and_size(group)
    config = _config()
    config.moe_expert_rank_capacity_factor = 0.5  # set after Megatron's own check, which requires a GPU-only back end
    replace_deepep(num_max_tokens_per_rank=8)
    dispatcher = _dispatcher(group, config)
    manager, seen = dispatcher._comm_manager, []
    for factor in (0.5, None, 0.5):
        manager.moe_expert_rank_capacity_factor = factor
        x = cases_megatron.inputs_of(rank, 8).view(-1, 1, HIDDEN)
        routing_map = torch.zeros(8, EXPERTS, dtype=torch.bool)
        routing_map[:, :TOPK] = True
        probs = routing_map.float() / TOPK
        hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, _ = dispatcher.token_dispatch(hidden, token_probs)
        rows, _, probs = dispatcher.dispatch_postprocess(rows, None)
        out = dispatcher.token_combine(dispatcher.combine_preprocess(rows * probs[:, None]))
        over = dispatcher.check_over_budget()
        seen.append([bool(over), torch.allclose(out, x.view(-1, HIDDEN), atol=1e-6)])
        dispatcher.reset_over_budget()
        assert not over
    return seen


def check_signatures(group: Any, parameters: dict[str, list[str]], attributes: list[str]) -> None:
    for method, names in parameters.items():
        assert list(inspect.signature(getattr(token_dispatcher._DeepepManager, method)).parameters) == names, method
    for method in token_dispatcher._DispatchManager.__abstractmethods__:
        assert method in parameters
    kinds = token_dispatcher.MoEFlexTokenDispatcher, token_dispatcher.MoETokenDispatcher
    source = "".join(inspect.getsource(kind) for kind in kinds)
    for name in attributes:
        assert f"self.{name}" in source
    # `install` recognises the flexible dispatcher by its manager: no other kind has one.
    for kind in (token_dispatcher.MoEAlltoAllTokenDispatcher, token_dispatcher.MoEAllGatherTokenDispatcher):
        assert "_comm_manager" not in inspect.getsource(kind)
