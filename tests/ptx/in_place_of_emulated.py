"""A pytest plugin that runs tests of the emulated GPU (host threads) on executed PTX.

    python -m pytest -p ptx.in_place_of_emulated tests/conformance -k loopback

The device's clock almost stands still, so that no wait expires however long lanes take. PTX_CLOCK=host selects the
host's clock, for tests of waits that expire. --ptx-share 3/40 runs every fortieth test, from the fourth on. With
pytest-xdist the workers execute.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import support.emulated_gpu
import support.ranks
from ptx.gpu import PtxGpu, load

_OUTPUT = "ptx"
_executed = [0, 0]  # launches and accesses of workers


class InPlaceOfEmulated(PtxGpu):
    """Accepts the arguments of EmulatedGpu; lanes and constants are those of the compiled kernels."""

    def __init__(self, num_sms: int = 10, threads: int = 0, constants: bool = True) -> None:
        super().__init__(num_sms=num_sms, real_time=os.environ.get("PTX_CLOCK") == "host")
        self.outlived: list[int] = []

    def outlive_stream(self, memory: Any) -> None:
        self.outlived.append(memory.data_ptr())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx-share", default="0/1", help="which part of the tests to run: index/number")


@pytest.hookimpl(trylast=True)  # selects from the tests that other hooks left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, number = map(int, config.getoption("--ptx-share").split("/"))
    left_out = [item for at, item in enumerate(items) if at % number != index]
    items[:] = items[index::number]
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_OUTPUT] = _executed_here()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    launches, accesses = getattr(node, "workeroutput", {}).get(_OUTPUT, (0, 0))
    _executed[0] += launches
    _executed[1] += accesses


def pytest_terminal_summary(terminalreporter: Any) -> None:
    launches, accesses = (a + b for a, b in zip(_executed, _executed_here(), strict=True))
    terminalreporter.write_line(f"executed PTX: {launches} launches, {accesses} accesses")


def _executed_here() -> tuple[int, int]:
    return PtxGpu.num_launches, int(load().ptx_accesses())


load()  # before tests make tensors
support.ranks.CASE_TIMEOUT_S = 3600.0  # chains of many launches, on a busy machine
support.emulated_gpu.EmulatedGpu = InPlaceOfEmulated  # type: ignore[assignment,misc]
