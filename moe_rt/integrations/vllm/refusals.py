"""Refuses settings of vLLM with which expert parallelism over moe_rt would be wrong or is untested.

A server must refuse before it reports that it is healthy, so most settings are checked when vLLM makes its
configuration from its arguments. Settings of a layer are checked when the layer is made, and all others again, for
programs that make a configuration in another way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms import current_platform

from moe_rt.integrations.vllm import PLUGIN
from moe_rt.integrations.vllm.settings import chosen

BACKEND = "allgather_reducescatter"  # vLLM's default
# Fields that ParallelConfig and EngineArgs share.
FIELDS = {"all2all_backend", "enable_dbo", "enable_elastic_ep", "enable_eplb", "enable_expert_parallel", "ubatch_size"}
FIELDS |= {"enable_fault_tolerance", "pipeline_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size"}


def early(create: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    """Return EngineArgs.create_engine_config that also refuses settings that moe_rt does not support.

    The arguments are checked, not the configuration, because on CPUs vLLM drops --enable-dbo from it. Settings that
    vLLM refuses itself are refused with a message that says what to do with moe_rt.
    """

    @functools.wraps(create)
    def create_and_refuse(arguments: EngineArgs, *more: Any, **named: Any) -> VllmConfig:
        try:
            config = create(arguments, *more, **named)
        except ValueError:
            if arguments.enable_expert_parallel:
                refuse_unserved(arguments, lora=arguments.enable_lora)
            raise
        refuse_config(config, arguments)
        return config

    create_and_refuse.of_moe_rt = True  # type: ignore[attr-defined]
    return create_and_refuse


def refuse_config(config: VllmConfig, arguments: EngineArgs) -> None:
    """Raise InvalidConfig if the configuration made from the arguments spreads experts in an unsupported way.

    Models without experts, and models on one rank, do not use moe_rt and are not checked.
    """
    parallel, model = config.parallel_config, config.model_config
    num_ranks = parallel.data_parallel_size * parallel.world_size // parallel.pipeline_parallel_size
    if model is None or not model.is_moe or num_ranks == 1:
        return
    if parallel.enable_expert_parallel:
        refuse_unserved(arguments, lora=arguments.enable_lora)
        refuse_few_experts(model.get_num_experts(), num_ranks)
        chosen(config)
    elif parallel.data_parallel_size > 1 and current_platform.is_cpu():
        ranks = f"{parallel.data_parallel_size} data-parallel ranks without --enable-expert-parallel"
        raise PLUGIN.unserved(ranks, "that flag, too: vLLM has nothing on CPUs that shares experts in another way")


def refuse_unserved(asked: EngineArgs | ParallelConfig, *, lora: bool) -> None:
    """Raise InvalidConfig for the first unsupported setting of ranks that share experts; names the expected one."""
    _raise_first(
        {
            f"the platform {current_platform.device_name}": (
                not (current_platform.is_cpu() or current_platform.is_cuda()),
                "CPUs or NVIDIA GPUs",
            ),
            f"--all2all-backend {asked.all2all_backend}": (
                asked.all2all_backend != BACKEND,
                f"{BACKEND} (vLLM's default), whose place moe_rt takes",
            ),
            f"--tensor-parallel-size {asked.tensor_parallel_size} --enable-expert-parallel": (
                asked.tensor_parallel_size > 1,
                "--tensor-parallel-size 1, and the ranks in --data-parallel-size: a rank has tokens of its own",
            ),
            f"--pipeline-parallel-size {asked.pipeline_parallel_size}": (
                asked.pipeline_parallel_size > 1,
                "1, and the ranks in --data-parallel-size",
            ),
            f"--prefill-context-parallel-size {asked.prefill_context_parallel_size}": (
                asked.prefill_context_parallel_size > 1,
                "1",
            ),
            "--enable-lora": (lora, "no LoRA on a model whose experts are spread"),
            "--enable-elastic-ep": (asked.enable_elastic_ep, "a fixed number of ranks"),
            "--enable-eplb": (asked.enable_eplb, "experts that stay where they are"),
            "--enable-fault-tolerance": (
                asked.enable_fault_tolerance,
                "a server that ends with its first rank, and is started again",
            ),
            "--enable-dbo or --ubatch-size": (asked.enable_dbo or asked.ubatch_size > 1, "one batch at a time"),
        }
    )


def refuse_layer(moe: FusedMoEConfig, parallel: ParallelConfig, *, monolithic: bool, modular: bool) -> None:
    """Raise InvalidConfig for a layer that shares its experts in an unsupported way.

    Args:
        moe: config of the layer.
        monolithic: the experts do their own routing.
        modular: the caller accepts a separate prepare and finalize.
    """
    refuse_unserved(parallel, lora=moe.is_lora_enabled)
    refuse_few_experts(moe.num_experts, moe.moe_parallel_config.ep_size)
    _raise_first(
        {
            "experts that do their own routing (monolithic kernels)": (
                monolithic or not modular,
                "a checkpoint or --moe-backend whose experts take routed tokens",
            )
        }
    )


def refuse_few_experts(num_experts: int, num_ranks: int) -> None:
    _raise_first(
        {f"{num_experts} experts on {num_ranks} ranks": (num_experts < num_ranks, "at least one for each rank")}
    )


def _raise_first(refusals: dict[str, tuple[bool, str]]) -> None:
    """Raise InvalidConfig for the first refused setting; each has a condition and the expected setting."""
    for setting, (unserved, expected) in refusals.items():
        if unserved:
            raise PLUGIN.unserved(setting, expected)
