"""SGLang with the plug-in: hooks apply to one backend, and only if chosen; wrong versions are refused at start."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stand_ins  # noqa: F401
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.runtime_context import get_flags

from moe_rt.errors import InvalidConfig
from moe_rt.integrations.sglang import hooks

LOADS = """
import sys
import sglang_stand_ins
from sglang.srt.plugins import load_plugins
load_plugins()
"""
# The places in which SGLang has the two names after plug-ins are loaded, and whether moe_rt wrapped them.
ASKS = """
from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.fused_moe_triton import layer
from sglang.srt.models import qwen3_moe
wrapped = [hasattr(f, "__wrapped__") for f in (
    layer.create_moe_dispatcher, utils.is_deepep_class_backend, qwen3_moe.is_deepep_class_backend)]
print("wrapped", *wrapped, "imported", "moe_rt.integrations.sglang.hooks" in sys.modules)
"""


def load(chosen: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Run SGLang's search for plug-ins with this value of MOE_RT_SGLANG."""
    return subprocess.run(
        [sys.executable, "-c", before + LOADS + after], capture_output=True, text=True, timeout=600,
        env={**os.environ, "MOE_RT_SGLANG": chosen},
    )  # fmt: skip


def test_sglang_finds_the_hooks_and_applies_them_where_they_are_chosen() -> None:
    done = load("1", after=ASKS)
    assert "wrapped True True True imported True" in done.stdout, done.stderr


def test_untouched_elsewhere() -> None:
    done = load("0", after=ASKS)
    assert "wrapped False False False imported False" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("chosen", "before", "says"),
    [
        ("yes", "", "InvalidConfig: MOE_RT_SGLANG: got 'yes', expected 1"),
        (
            "1",
            "import sglang_stand_ins; from sglang.srt.layers.moe.fused_moe_triton import layer\n"
            "layer.create_moe_dispatcher = lambda config: None",
            "InvalidConfig: sglang 0.5.23: got no create_moe_dispatcher(moe_runner_config, quant_method); expected the",
        ),
        (
            "1",
            "import sys; sys.modules['sglang.srt.layers.moe.token_dispatcher'] = None",
            "MissingPackage: sglang 0.5.23: import of sglang.srt.layers.moe.token_dispatcher halted",
        ),
    ],
)
def test_sglang_does_not_start_without_what_was_chosen(chosen: str, before: str, says: str) -> None:
    """SGLang exits with moe_rt's error, although it only logs other plug-ins' exceptions."""
    done = load(chosen, before, "print('went on')")
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith(says)


def original(moe_runner_config: Any, quant_method: Any) -> Any:
    return "SGLang's own", moe_runner_config, quant_method


def test_other_backends_are_left_to_sglang() -> None:
    for backend in set(MoeA2ABackend) - {MoeA2ABackend.CUSTOMIZED}:
        with get_flags().moe.override(a2a_backend=backend):
            assert hooks.create(original, 1, quant_method=2) == ("SGLang's own", 1, 2)
            for complete in (False, True):
                assert hooks.is_complete(lambda complete=complete: complete) == complete


def test_ours_is_made_and_completes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(hooks, "refuse_unserved", lambda *of: checked.append(of))
    monkeypatch.setattr(hooks, "make_exchange", lambda config: ("exchange of", config))
    with get_flags().moe.override(a2a_backend=MoeA2ABackend.CUSTOMIZED):
        made = hooks.create(original, 1, quant_method=2)
        assert hooks.is_complete(lambda: False)
    assert type(made) is hooks.MoeRtDispatcher
    assert made._exchange == ("exchange of", 1)
    assert checked == [(1, 2)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(_COMPLETE=(hooks.utils, "is_complete", set())), r"got no is_complete\(\)"),
        (dict(_BACKEND=(MoeA2ABackend, "is_ours", {"self"})), r"got no is_ours\(self\)"),
        (dict(BaseDispatcher=SimpleNamespace(__abstractmethods__={"dispatch", "wait"})), "also has wait;"),
        (dict(_ROWS={"hidden_states", "scales"}), "got no scales in its rows"),
    ],
)
def test_other_interfaces_are_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str) -> None:
    hooks._compare()
    for name, value in change.items():
        monkeypatch.setattr(hooks, name, value)
    with pytest.raises(InvalidConfig, match=says):
        hooks._compare()
