"""Transformers models with random weights, small enough for two ranks of one core each."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 61

# Six experts and three per token if the family allows it, so that a token often names experts of both ranks.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(intermediate_size=24, num_local_experts=6, num_experts_per_tok=3),
    "qwen3_moe": dict(intermediate_size=24, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, head_dim=8),
    "deepseek_v3": dict(
        intermediate_size=40,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_hidden_layers=3,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    # Transposed, interleaved and clamped gates, and biases.
    "gpt_oss": dict(intermediate_size=24, num_local_experts=6, num_experts_per_tok=3, head_dim=8),
    # Experts without a gate.
    "nemotron_h": dict(
        intermediate_size=24,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=3,
        layers_block_type=["full_attention", "moe", "full_attention", "moe"],
        head_dim=8,
    ),
    # Transposed, without biases.
    "aria_text": dict(intermediate_size=24, moe_num_experts=6, moe_topk=3, moe_num_shared_experts=1, head_dim=8),
}

# A norm follows each expert, so these run through their own forward. Only an image model contains this language model.
WITH_NORM = "muse_spark_text"
EXPERTS = {
    **FAMILIES,
    WITH_NORM: dict(
        intermediate_size=24,
        moe_intermediate_size=24,
        moe_hidden_size=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        head_dim=8,
    ),
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoConfig.for_model(family, **{**common, **EXPERTS.get(family, {}), **changes})
