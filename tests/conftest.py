"""Fixtures: groups of ranks, one pool of processes per size for the whole session."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from device.emulated import EmulatedGpu
from harness import ProcessRanks, Ranks, ThreadRanks

# `make serve-test` runs these, each in an environment that has what it tests.
SERVERS = {"vllm": "serving", "sglang": "serving_sglang"}
collect_ignore = [tests for server, tests in SERVERS.items() if not importlib.util.find_spec(server)]
CPU_HEAPS = ("threads", "shm")
# "loopback" is the CUDA engine with its kernels on an emulated GPU.
HEAPS = (*CPU_HEAPS, "loopback")
# Files that a worker takes half a minute for, first, so that none is left with one of them when the others are done.
LONGEST = (
    "test_compiled.py",
    "test_docs.py",
    "test_model.py",
    "test_estimate.py",
    "test_races.py",
    "test_training_over_nodes.py",
    "test_transformers.py",
    "test_data_parallel.py",
    "test_bench.py",
    "test_fuzz.py",
    "test_lanes.py",
    "test_emulated_nodes.py",
    "test_conformance.py",
    "test_gpucheck.py",
    "test_bench_on_nodes.py",
    "test_scaled_rows.py",
    "test_gpucheck_steps.py",
    "test_extras.py",
    "test_modes.py",
    "test_first_failure.py",
    "test_matrix.py",
    "test_soak.py",
    "test_jit.py",
    "test_gpucheck_processes.py",
    "test_run.py",
    "test_endings.py",
    "test_network.py",
    "test_sass.py",
    "test_pinned_compilers.py",
    "test_parity.py",
    "test_real_megatron.py",
    "test_real_torchtitan.py",
    "test_survivors.py",
    "test_layer.py",
    "test_transformers_trainer.py",
    "test_over_nodes.py",
    "test_free_running.py",
    "test_far_failures.py",
    "test_ptx_rounds.py",
)
# Programs that tests start would take a thread for each core, and spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's compiler would start a process for each core in every program that compiles, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A shell has its jobs in the background ignore Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="also run what is marked as sweep: every combination")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --sweep, combinations whose parts other tests prove are left out; the longest files come first."""
    if not config.getoption("--sweep"):
        left_out = [item for item in items if item.get_closest_marker("sweep")]
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Garbage is looked for in what tests make, not in all that was imported: a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def make_ranks() -> Iterator[Callable[[str, int], Ranks]]:
    """make_ranks(heap, size): ranks to run cases on; a module's cases share its processes.

    No longer than that: the thread of each gloo group that a case left behind wakes 100 times a second.
    """
    pools: dict[int, ProcessRanks] = {}

    def make(heap: str, size: int) -> Ranks:
        if heap == "threads":
            return ThreadRanks(size)
        if heap == "loopback":
            return ThreadRanks(size, EmulatedGpu())
        if size not in pools:
            pools[size] = ProcessRanks(size)
        return pools[size]

    yield make
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
