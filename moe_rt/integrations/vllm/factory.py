"""Installs moe_rt's prepare and finalize in the factory from which all expert kernels of vLLM get theirs.

Unsupported settings are refused when vLLM makes its configuration, before its other processes start.

Compilers must not trace into prepare and finalize, because the number of received rows is not constant. On GPUs vLLM
makes a whole layer of experts one opaque op. On CPUs it lets compilers trace layers, except layers over moe_rt.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEPrepareAndFinalizeModular
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from moe_rt.integrations.vllm import PLUGIN, orphans
from moe_rt.integrations.vllm.prepare_finalize import MoeRtPrepareAndFinalize
from moe_rt.integrations.vllm.refusals import FIELDS, early, refuse_layer
from moe_rt.integrations.vllm.settings import chosen, make_buffer
from moe_rt.integrations.vllm.token_rows import TokenRowsPrepareAndFinalize

_NAME = "maybe_make_prepare_finalize"
_PARAMETERS = {"moe", "quant_config", "allow_new_interface", "use_monolithic", "all2all_manager"}


def install() -> None:
    """Wrap vLLM's factory, also in modules that have imported it already.

    Raises:
        InvalidConfig: vLLM's interfaces differ from the tested release.
    """
    original = getattr(all2all_utils, _NAME, None)
    if getattr(original, "of_moe_rt", False):
        return
    _compare(original)
    assert original is not None
    wrapped = wrap(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, _NAME, None) is original:
            setattr(module, _NAME, wrapped)
    MoERunner._select_forward = opaque(MoERunner._select_forward)
    EngineArgs.create_engine_config = early(EngineArgs.create_engine_config)
    orphans.install()


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory that uses moe_rt for the layers of `runs_over`, and `original` for other layers."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        moe = given.arguments["moe"]
        if not runs_over(moe):
            return original(*args, **kwargs)
        refuse_layer(
            moe,
            get_current_vllm_config().parallel_config,
            monolithic=given.arguments["use_monolithic"],
            modular=given.arguments["allow_new_interface"],
        )
        if not moe.moe_parallel_config.use_ep:
            return MoeRtPrepareAndFinalize(make_buffer(moe, None))
        if current_platform.is_cpu():
            manager = given.arguments["all2all_manager"] or all2all_utils.get_ep_all2all_manager()
            return MoeRtPrepareAndFinalize(make_buffer(moe, manager.cpu_group))
        return TokenRowsPrepareAndFinalize(make_buffer(moe, get_ep_group().device_group))

    make.of_moe_rt = True  # type: ignore[attr-defined]
    return make


def runs_over(moe: FusedMoEConfig) -> bool:
    """True if a layer runs over moe_rt: its experts are spread, or one CPU rank must add up as several do."""
    parallel = moe.moe_parallel_config
    alone = parallel.tp_size == 1  # without expert parallelism it counts all ranks
    return parallel.use_ep or (
        alone and current_platform.is_cpu() and chosen(get_current_vllm_config()).sums == "invariant"
    )


def opaque(original: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """Return MoERunner._select_forward that picks vLLM's opaque op if a compiler runs and experts are spread."""

    @functools.wraps(original)
    def select(runner: Any) -> Callable[..., Any]:
        mode = get_current_vllm_config().compilation_config.mode
        if mode == CompilationMode.NONE or not runs_over(runner.moe_config):
            return original(runner)
        ops = torch.ops.vllm
        return ops.moe_forward if runner._shared_experts is None else ops.moe_forward_shared

    return select


def _compare(original: Callable[..., Any] | None) -> None:
    """Raise unless vLLM has the wrapped names and requires only methods that MoeRtPrepareAndFinalize has."""
    lacking = sorted(_PARAMETERS - set(inspect.signature(original).parameters)) if original else [_NAME]
    lacking += sorted(FIELDS - {field.name for field in fields(EngineArgs)})
    asked = sorted(FusedMoEPrepareAndFinalizeModular.__abstractmethods__ - set(vars(MoeRtPrepareAndFinalize)))
    if lacking or asked:
        found = f"no {', '.join(lacking)}" if lacking else f"a contract that also has {', '.join(asked)}"
        raise PLUGIN.different(found)
