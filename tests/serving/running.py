"""Fixtures of `make serve-test`, a plug-in of pytest: models, and engines that run them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before vLLM is imported, which is once, by the process that all engines are forked from.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401
from engine_ranks import EngineRanks
from models import save


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model(family): where it is saved."""
    saved: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in saved:
            saved[family] = tmp_path_factory.mktemp(family)
            # Not here: progress bars start a thread, and engines are forked from a process that has none.
            saving = multiprocessing.get_context("fork").Process(target=save, args=(family, saved[family]))
            saving.start()
            saving.join()
            assert saving.exitcode == 0
        return saved[family]

    return get


@pytest.fixture
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints past pytest's capture. With capsys, engines would be forked with a stderr that has no descriptor."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", end="", flush=True)

    return say


@pytest.fixture(scope="module")
def engines(model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """engines(family, size, **engine): running ones, made once for a module."""
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
