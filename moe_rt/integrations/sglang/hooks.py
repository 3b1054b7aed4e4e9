"""Two hooks around SGLang's own functions: which dispatcher a layer gets, and that its combine completes the output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.fused_moe_triton import layer
from sglang.srt.layers.moe.token_dispatcher import BaseDispatcher, StandardDispatchOutput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from moe_rt.integrations.sglang import PLUGIN
from moe_rt.integrations.sglang.dispatcher import MoeRtDispatcher
from moe_rt.integrations.sglang.settings import make_exchange, refuse_unserved

# What is called, with which parameters.
_CREATE = (layer, "create_moe_dispatcher", {"moe_runner_config", "quant_method"})
_COMPLETE = (utils, "is_deepep_class_backend", set[str]())
_BACKEND = (utils.MoeA2ABackend, "is_customized", {"self"})
_ROWS = {"hidden_states", "hidden_states_scale", "topk_output"}


@functools.cache
def install() -> None:
    """Registers both with SGLang, which applies them when all plug-ins have been called.

    Raises:
        InvalidConfig: this SGLang's interfaces are not the tested ones.
    """
    _compare()
    for (module, name, _), hook in ((_CREATE, create), (_COMPLETE, is_complete)):
        HookRegistry.register(f"{module.__name__}.{name}", hook, HookType.AROUND)


def create(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any, **more: Any) -> Any:
    """Ours for moe_a2a_backend="customized", and what `original` makes for all others."""
    if not utils.get_moe_a2a_backend().is_customized():
        return original(moe_runner_config, quant_method=quant_method, **more)
    refuse_unserved(moe_runner_config, quant_method)
    return MoeRtDispatcher(make_exchange(moe_runner_config))


def is_complete(original: Callable[[], bool]) -> bool:
    """True for ours, too: models must not add up over ranks what combine has added up."""
    return original() or utils.get_moe_a2a_backend().is_customized()


def _compare() -> None:
    """Raises unless this SGLang calls what we hook into, and asks of it what we have."""
    for place, name, parameters in (_CREATE, _COMPLETE, _BACKEND):
        there = getattr(place, name, None)
        if there is None or set(inspect.signature(there).parameters) != parameters:
            raise PLUGIN.different(f"no {name}({', '.join(sorted(parameters))})")
    asked = sorted(BaseDispatcher.__abstractmethods__ - set(vars(MoeRtDispatcher)))
    lacking = sorted(_ROWS - set(StandardDispatchOutput._fields))
    if asked or lacking:
        found = f"a contract that also has {', '.join(asked)}" if asked else f"no {', '.join(lacking)} in its rows"
        raise PLUGIN.different(found)
