"""Two hooks around SGLang's functions: one makes a layer's dispatcher, one marks its combined output as complete."""

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

# SGLang's functions that are hooked or called, and their parameters.
_CREATE = (layer, "create_moe_dispatcher", {"moe_runner_config", "quant_method"})
_COMPLETE = (utils, "is_deepep_class_backend", set[str]())
_BACKEND = (utils.MoeA2ABackend, "is_customized", {"self"})
_ROWS = {"hidden_states", "hidden_states_scale", "topk_output"}


@functools.cache
def install() -> None:
    """Register both hooks with SGLang, which applies them after all plug-ins have been called.

    Raises:
        InvalidConfig: SGLang's interfaces differ from the tested release.
    """
    _compare()
    for (module, name, _), hook in ((_CREATE, create), (_COMPLETE, is_complete)):
        HookRegistry.register(f"{module.__name__}.{name}", hook, HookType.AROUND)


def create(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any, **more: Any) -> Any:
    """Return moe_rt's dispatcher for moe_a2a_backend="customized", and that of `original` for other back ends."""
    if not utils.get_moe_a2a_backend().is_customized():
        return original(moe_runner_config, quant_method=quant_method, **more)
    refuse_unserved(moe_runner_config, quant_method)
    return MoeRtDispatcher(make_exchange(moe_runner_config))


def is_complete(original: Callable[[], bool]) -> bool:
    """True for moe_rt's back end also: models must not sum outputs over ranks again after combine."""
    return original() or utils.get_moe_a2a_backend().is_customized()


def _compare() -> None:
    """Raise unless SGLang has the functions that are hooked and requires only methods that MoeRtDispatcher has."""
    for place, name, parameters in (_CREATE, _COMPLETE, _BACKEND):
        there = getattr(place, name, None)
        if there is None or set(inspect.signature(there).parameters) != parameters:
            raise PLUGIN.different(f"no {name}({', '.join(sorted(parameters))})")
    asked = sorted(BaseDispatcher.__abstractmethods__ - set(vars(MoeRtDispatcher)))
    lacking = sorted(_ROWS - set(StandardDispatchOutput._fields))
    if asked or lacking:
        found = f"a contract that also has {', '.join(asked)}" if asked else f"no {', '.join(lacking)} in its rows"
        raise PLUGIN.different(found)
