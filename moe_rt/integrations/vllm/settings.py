"""From vLLM's own configuration to a buffer, and which of its settings moe_rt does not serve."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.platforms import current_platform

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.shared_buffers import shared_buffer
from moe_rt.config.codec import Codec
from moe_rt.config.options import BufferOptions
from moe_rt.errors import InvalidConfig
from moe_rt.integrations.vllm import PLUGIN

KEY = "moe_rt"  # of --additional-config
# What a server's owner may choose: the rest follows from the model, or would turn requests away.
CHOICES = ("combine_dtype", "dispatch_dtype", "init_timeout_s", "num_threads", "timeout_s")


def refuse_unserved(moe: FusedMoEConfig, *, monolithic: bool, modular: bool) -> None:
    """Raises for settings under which expert parallelism over moe_rt would be wrong, or was never tried.

    Args:
        moe: of the layer.
        monolithic: the experts route for themselves.
        modular: the caller takes a separate prepare and finalize.

    Raises:
        InvalidConfig: naming the setting and what to do about it.
    """
    config = get_current_vllm_config()
    parallel, of_layer = config.parallel_config, moe.moe_parallel_config
    default = "allgather_reducescatter"
    refusals = {
        f"the platform {current_platform.device_name}": (
            not (current_platform.is_cpu() or current_platform.is_cuda()),
            "CPUs or NVIDIA GPUs",
        ),
        f"--all2all-backend {of_layer.all2all_backend}": (
            of_layer.all2all_backend != default,
            f"{default} (vLLM's default), whose place moe_rt takes",
        ),
        f"--tensor-parallel-size {parallel.tensor_parallel_size} --enable-expert-parallel": (
            parallel.tensor_parallel_size > 1,
            "--tensor-parallel-size 1 and the ranks in --data-parallel-size: a rank of moe_rt has tokens of its own",
        ),
        f"--prefill-context-parallel-size {of_layer.pcp_size}": (of_layer.pcp_size > 1, "1"),
        "--enable-lora": (moe.is_lora_enabled, "no LoRA on a model whose experts are spread"),
        "--enable-eplb": (of_layer.enable_eplb, "experts that stay where they are"),
        "--enable-elastic-ep": (bool(getattr(parallel, "enable_elastic_ep", False)), "a fixed number of ranks"),
        "--enable-fault-tolerance": (
            bool(getattr(parallel, "enable_fault_tolerance", False)),
            "a server that ends with its first rank, and is started again",
        ),
        "--enable-dbo or --ubatch-size": (parallel.use_ubatching, "one batch at a time"),
        "experts that do their own routing (monolithic kernels)": (
            monolithic or not modular,
            "a checkpoint or --moe-backend whose experts take routed tokens",
        ),
        f"{moe.num_experts} experts on {of_layer.ep_size} ranks": (
            moe.num_experts < of_layer.ep_size,
            "at least one for each rank",
        ),
    }
    for setting, (unserved, expected) in refusals.items():
        if unserved:
            raise PLUGIN.unserved(setting, expected)


def make_buffer(moe: FusedMoEConfig, group: ProcessGroup) -> Buffer:
    """The buffer of all layers of one kind. Collective.

    Args:
        moe: of the layer.
        group: of the ranks that share its experts: with gloo on CPUs, with NCCL on GPUs.
    """
    num_ranks = moe.moe_parallel_config.ep_size
    ranks = torch.empty(moe.num_experts, dtype=torch.int64)
    for rank in range(num_ranks):
        expert_map = determine_expert_map(num_ranks, rank, moe.num_experts)[1]
        assert expert_map is not None
        ranks[expert_map >= 0] = rank
    return shared_buffer(
        group,
        num_max_tokens_per_rank=moe.max_num_tokens,
        hidden=moe.hidden_dim,
        num_topk=moe.experts_per_token,
        num_experts=moe.num_experts,
        dtype=moe.in_dtype,
        # vLLM's experts for CPUs take no row with experts of other ranks.
        layout="experts" if current_platform.is_cpu() else "tokens",
        **{**chosen(get_current_vllm_config()).arguments(), "placement": tuple(ranks.tolist())},
    )


def chosen(config: VllmConfig) -> BufferOptions:
    """The options in --additional-config '{"moe_rt": {...}}'.

    Raises:
        InvalidConfig: it is no object, or has a key that is not in CHOICES, or a value of the wrong type.
    """
    additional = config.additional_config
    given = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    unknown = sorted(set(given) - set(CHOICES)) if isinstance(given, dict) else [repr(given)]
    if unknown:
        raise InvalidConfig(f"additional_config {KEY}: got {', '.join(unknown)}, expected keys of {', '.join(CHOICES)}")
    return BufferOptions(**{name: _value(name, value) for name, value in given.items()})


def _value(name: str, value: Any) -> Any:
    if name.endswith("_dtype"):
        names = {str(dtype).removeprefix("torch."): dtype for dtype in Codec.dtypes()}
        if value is not None and value not in names:
            raise InvalidConfig(
                f"additional_config {KEY}: {name}: got {value!r}, expected null or one of {list(names)}"
            )
        return None if value is None else names[value]
    default = next(field.default for field in fields(BufferOptions) if field.name == name)
    if isinstance(value, bool) or not isinstance(value, (int, float) if isinstance(default, float) else int):
        raise InvalidConfig(f"additional_config {KEY}: {name}: got {value!r}, expected a number like {default}")
    return value
