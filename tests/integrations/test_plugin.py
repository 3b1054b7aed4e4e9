"""Texts and choices of the part that all server plug-ins share."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.integrations import plugin
from moe_rt.integrations.plugin import Plugin

OURS = Plugin(
    variable="MOE_RT_SERVER", packages=("server", "server-cpu"), tested="1.2", install="pip install server==1.2"
)
TO_DO = "expected the interfaces of server 1.2: pip install server==1.2, take a newer moe_rt, or unset MOE_RT_SERVER"


@pytest.mark.parametrize(
    ("versions", "here"),
    [
        ({"server": "3.0", "server-cpu": "4.0"}, "server 3.0"),
        ({"server-cpu": "4.0"}, "server-cpu 4.0"),
        ({}, "no server"),
    ],
)
def test_what_is_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], here: str) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(plugin, "version", version)
    missing = OURS.missing(ImportError("no module"))
    assert type(missing) is MissingPackage
    assert str(missing).startswith(f"{here}: no module; {TO_DO} (")
    different = OURS.different("another hook")
    assert type(different) is InvalidConfig
    assert str(different).startswith(f"{here}: got another hook; {TO_DO} (")


def test_a_setting_that_is_not_served() -> None:
    error = OURS.unserved("eplb", "no eplb")
    assert type(error) is InvalidConfig
    assert str(error).startswith("server: got eplb, expected no eplb; or unset MOE_RT_SERVER (")


def test_what_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_RT_SERVER", raising=False)
    assert OURS.is_chosen() is False
    for value, chosen in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("MOE_RT_SERVER", value)
        assert OURS.is_chosen() is chosen
    for value in ("2", "01", "true"):
        monkeypatch.setenv("MOE_RT_SERVER", value)
        with pytest.raises(InvalidConfig) as caught:
            OURS.is_chosen()
        text = f"MOE_RT_SERVER: got '{value}', expected 1 to send tokens over moe_rt, or 0 ("
        assert str(caught.value).startswith(text)
