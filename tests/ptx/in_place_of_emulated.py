"""A pytest plugin: what other tests run on an emulated GPU of host threads runs here as PTX.

    python -m pytest -p ptx.in_place_of_emulated tests/conformance -k loopback

The device's clock stands almost still, so that no wait expires however long lanes take; with PTX_CLOCK=host in the
environment it is the host's, for tests of waits that expire.
"""

from __future__ import annotations

import os
from typing import Any

import device.emulated
from ptx.gpu import PtxGpu, load


class InPlaceOfEmulated(PtxGpu):
    """Takes what EmulatedGpu takes; lanes and constants are those of the compiled kernels."""

    def __init__(self, num_sms: int = 10, threads: int = 0, constants: bool = True) -> None:
        super().__init__(num_sms=num_sms, real_time=os.environ.get("PTX_CLOCK") == "host")
        self.outlived: list[int] = []

    def outlive_stream(self, memory: Any) -> None:
        self.outlived.append(memory.data_ptr())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"executed PTX: {PtxGpu.num_launches} launches, {load().ptx_accesses()} accesses")


load()  # before tests make tensors
device.emulated.EmulatedGpu = InPlaceOfEmulated  # type: ignore[assignment,misc]
