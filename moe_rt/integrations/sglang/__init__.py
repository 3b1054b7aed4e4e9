"""Expert parallelism for SGLang: with MOE_RT_SGLANG=1 and moe_a2a_backend="customized", its tokens travel over moe_rt.

SGLang finds `register` by the entry point `sglang.srt.plugins` and calls it in each of its processes. Nothing is
changed, and nothing of SGLang imported, unless the variable is set. docs/howto/serving_sglang.md is the guide.
"""

from __future__ import annotations

from moe_rt.errors import MoeRtError
from moe_rt.integrations.plugin import Plugin

PLUGIN = Plugin(variable="MOE_RT_SGLANG", packages=("sglang",), tested="0.5.23", install="pip install sglang==0.5.23")


def register() -> None:
    """Hooks moe_rt into SGLang, if the variable says so. Idempotent.

    Raises:
        SystemExit: the variable is neither 0 nor 1, or this version of SGLang has other interfaces than the tested.
            SGLang would log any Exception of a plug-in and go on without it.
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
