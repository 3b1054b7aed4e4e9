"""Makes a layer's exchange from SGLang's configuration, and refuses settings that moe_rt does not support."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_parallel, get_server_args, process_model_config

from moe_rt.buffer.pool import GrowingOptions
from moe_rt.integrations.exchange import LayerExchange
from moe_rt.integrations.sglang import PLUGIN

# Tested models. Each model of SGLang decides whether it sums the experts' outputs over ranks; one that does so after
# combine gives wrong answers without an error.
MODELS = ("Qwen3MoeForCausalLM",)
# Server argument -> (a true value that is harmless, if any; the expected setting).
UNSERVED: dict[str, tuple[Any, str]] = {
    "enable_lora": (None, "no LoRA on a model whose experts are spread"),
    "lora_paths": (None, "no LoRA on a model whose experts are spread"),
    "enable_eplb": (None, "experts that stay where they are"),
    "ep_num_redundant_experts": (None, "each expert on one rank"),
    "init_expert_location": ("trivial", "'trivial'"),
    "elastic_ep_backend": (None, "a fixed number of ranks"),
    "enable_two_batch_overlap": (None, "one batch at a time"),
    "enable_single_batch_overlap": (None, "one batch at a time"),
    "enable_torch_compile": (None, "eager mode"),
    "speculative_algorithm": (None, "no draft model"),
    "pp_size": (1, "1, and the ranks in tp_size"),
}


def refuse_unserved(config: Any, quant_method: Any) -> None:
    """Refuse settings with which expert parallelism over moe_rt would be wrong or is untested.

    Args:
        config: MoeRunnerConfig of the layer.
        quant_method: quantisation method of its experts.

    Raises:
        InvalidConfig: a setting is refused; names it and the expected one.
    """
    arguments, parallel = get_server_args(), get_parallel()
    for name, (harmless, expected) in UNSERVED.items():
        given = getattr(arguments, name, None)
        if given and given != harmless:
            raise PLUGIN.unserved(f"{name}={given!r}", expected)
    device = parallel.moe_ep_group.device.type
    models = process_model_config().hf_config.architectures
    refusals = {
        f"a model {', '.join(models)}": (not set(models) <= set(MODELS), f"{', '.join(MODELS)}: no other was tried"),
        f"device={device!r}": (device != "cpu", "'cpu': nothing else was tried"),
        f"ep_size={parallel.moe_ep_size} with tp_size={parallel.tp_size}": (
            parallel.moe_ep_size != parallel.tp_size,
            "the same: a rank of moe_rt has whole experts",
        ),
        f"dp_size={parallel.attn_dp_size} with tp_size={parallel.tp_size}": (
            parallel.attn_dp_size != parallel.tp_size,
            "the same, with enable_dp_attention: a rank of moe_rt has tokens of its own",
        ),
        "shared experts among the routed ones": (
            bool(config.num_fused_shared_experts),
            "disable_shared_experts_fusion",
        ),
        f"experts of {type(quant_method).__name__}": (
            type(quant_method) is not UnquantizedFusedMoEMethod,
            "a checkpoint whose experts are not quantised, and no quantization",
        ),
        "a model that weighs tokens before its experts (apply_router_weight_on_input)": (
            config.apply_router_weight_on_input,
            "one that weighs what they return",
        ),
    }
    for setting, (unserved, expected) in refusals.items():
        if unserved:
            raise PLUGIN.unserved(setting, expected)


def make_exchange(config: Any) -> LayerExchange:
    """Return the exchange of a layer. Layers made in succession share buffers, which grow with the batches.

    SGLang does not yet know, when it makes layers, how many requests will run concurrently.

    Args:
        config: MoeRunnerConfig of the layer.
    """
    return LayerExchange(
        get_parallel().moe_ep_group.cpu_group,
        num_experts=config.num_experts,
        num_topk=config.top_k,
        options=GrowingOptions(),
    )
