"""Expert parallelism for SGLang: with MOE_RT_SGLANG=1 and moe_a2a_backend="customized" it dispatches through moe_rt.

SGLang finds `register` by the entry point `sglang.srt.plugins` and calls it in each of its processes. Unless the
variable is set, nothing is changed and SGLang is not imported. docs/howto/serving_sglang.md is the guide.
"""

from __future__ import annotations

from moe_rt.errors import MoeRtError
from moe_rt.integrations.plugin import Plugin

PLUGIN = Plugin(variable="MOE_RT_SGLANG", packages=("sglang",), tested="0.5.23", install="pip install sglang==0.5.23")


def register() -> None:
    """Hook moe_rt into SGLang, if MOE_RT_SGLANG is 1. Idempotent.

    Raises:
        SystemExit: the variable is neither 0 nor 1, or SGLang is missing or has other interfaces than the tested
            release. SGLang would log an Exception of a plug-in and continue without it.
    """
    try:
        if PLUGIN.is_chosen():
            _install()
    except MoeRtError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def _install() -> None:
    try:
        from moe_rt.integrations.sglang.hooks import install
    except ImportError as error:
        raise PLUGIN.missing(error) from error
    install()
