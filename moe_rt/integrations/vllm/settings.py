"""Makes a buffer from vLLM's configuration and the options that a server's owner may set."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import torch
from torch.distributed import ProcessGroup
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.platforms import current_platform

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.pool import BufferPool
from moe_rt.config.codec import Codec
from moe_rt.config.options import BufferOptions, Sums
from moe_rt.errors import InvalidConfig

KEY = "moe_rt"  # key in --additional-config
# Options that a server's owner may set. The others follow from the model, or would make requests fail.
CHOICES = ("combine_dtype", "dispatch_dtype", "init_timeout_s", "num_threads", "sums", "timeout_s")


def make_buffer(moe: FusedMoEConfig, group: ProcessGroup | None) -> Buffer:
    """Return the buffer that all layers with equal sizes share. Collective.

    Args:
        moe: config of the layer.
        group: the ranks that share its experts; its back end is gloo on CPUs, NCCL on GPUs. None: a single rank.
    """
    num_ranks = moe.moe_parallel_config.ep_size
    ranks = torch.zeros(moe.num_experts, dtype=torch.int64)
    for rank in range(num_ranks) if num_ranks > 1 else ():
        expert_map = determine_expert_map(num_ranks, rank, moe.num_experts)[1]
        assert expert_map is not None
        ranks[expert_map >= 0] = rank
    return BufferPool(group).fixed(
        num_max_tokens_per_rank=moe.max_num_tokens,
        hidden=moe.hidden_dim,
        num_topk=moe.experts_per_token,
        num_experts=moe.num_experts,
        dtype=moe.in_dtype,
        # vLLM's experts for CPUs accept no rows with experts of other ranks.
        layout="experts" if current_platform.is_cpu() else "tokens",
        **{**chosen(get_current_vllm_config()).arguments(), "placement": tuple(ranks.tolist())},
    )


def chosen(config: VllmConfig) -> BufferOptions:
    """Return the options in --additional-config '{"moe_rt": {...}}'.

    Raises:
        InvalidConfig: the value is not an object, or has a key not in CHOICES or a value of the wrong type.
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
    if name == "sums":
        if value not in get_args(Sums):
            raise InvalidConfig(f"additional_config {KEY}: sums: got {value!r}, expected one of {list(get_args(Sums))}")
        return value
    default = next(field.default for field in fields(BufferOptions) if field.name == name)
    if isinstance(value, bool) or not isinstance(value, (int, float) if isinstance(default, float) else int):
        raise InvalidConfig(f"additional_config {KEY}: {name}: got {value!r}, expected a number like {default}")
    return value
