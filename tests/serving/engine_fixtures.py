"""Fixtures of `make serve-test`, a plug-in of pytest: models, and engines that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_rt.lab.testing.serving import import_vllm
from moe_rt.lab.testing.serving.engines import EngineRanks
from moe_rt.lab.testing.serving.models import save_apart

import_vllm()  # once, in the process that all engines and servers are forked from


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return model(family, **sizes), which saves a model and returns its path; `sizes` replace the family's."""
    saved: dict[tuple[Any, ...], Path] = {}

    def get(family: str, **sizes: Any) -> Path:
        key = (family, *sorted(sizes.items()))
        if key not in saved:
            saved[key] = save_apart(family, tmp_path_factory.mktemp(family), **sizes)
        return saved[key]

    return get


@pytest.fixture
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Print in spite of pytest's capture. With capsys, engines would be forked with a stderr that has no descriptor."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", end="", flush=True)

    return say


@pytest.fixture(scope="module")
def engines(model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Return engines(family, size, **engine), which starts engines once per module."""
    running: dict[tuple[Any, ...], EngineRanks] = {}

    def get(family: str, size: int, **engine: Any) -> EngineRanks:
        key = (family, size, *sorted(engine.items()))
        if key not in running:
            running[key] = EngineRanks(model(family), size, **engine)
            for said in running[key].started():
                if said is not None:
                    raise said
        return running[key]

    yield get
    for ranks in running.values():
        ranks.close()
