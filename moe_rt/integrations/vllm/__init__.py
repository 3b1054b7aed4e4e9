"""Expert parallelism for vLLM: with MOE_RT_VLLM=1 its layers send tokens to their experts over moe_rt.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. Nothing is
changed, and nothing of vLLM imported, unless the variable is set. docs/howto/serving.md is the guide.
"""

from __future__ import annotations

import os

from moe_rt.errors import InvalidConfig

VARIABLE = "MOE_RT_VLLM"


def register() -> None:
    """Takes the place of vLLM's all-gather and reduce-scatter, if the variable says so. Idempotent.

    Raises:
        InvalidConfig: the variable is neither 0 nor 1, or this version of vLLM has other interfaces than the tested.
    """
    chosen = os.environ.get(VARIABLE, "0")
    if chosen not in ("", "0", "1"):
        raise InvalidConfig(f"{VARIABLE}: got {chosen!r}, expected 1 to send tokens over moe_rt, or 0")
    if chosen == "1":
        from moe_rt.integrations.vllm.factory import install

        install()
