"""Fixtures: groups of ranks, with one pool of processes per size for the whole session."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from support import emulated_gpu, real_gpu
from support.ranks import ProcessRanks, Ranks, ThreadRanks

# `make serve-test` runs these directories, each in an environment with that server.
SERVERS = {"vllm": "serving", "sglang": "serving_sglang"}
collect_ignore = [tests for server, tests in SERVERS.items() if not importlib.util.find_spec(server)]
CPU_HEAPS = ("threads", "shm")
# "loopback" is the CUDA engine with its kernels on an emulated GPU.
HEAPS = (*CPU_HEAPS, "loopback")
# Run files that take half a minute first, so that no worker is left with one at the end.
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
    "test_own_experts_compiled.py",
    "test_real_tuning.py",
    "test_equal_steps.py",
    "test_over_nodes.py",
    "test_free_running.py",
    "test_remote_failures.py",
    "test_ptx_rounds.py",
)
# Programs that tests start would otherwise use a thread per core, and spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's compiler would start a process per core in every program that compiles, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A shell starts background jobs with Ctrl-C ignored, and programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="also run what is marked as sweep: every combination")
    parser.addoption("--gpu", action="store_const", const="cuda", help="run the tests of GPU ranks on a real GPU")
    parser.addoption("--gpu-rehearsal", dest="gpu", metavar="SM", help="rehearse --gpu: emulated, or such as sm_90a")


def pytest_configure(config: pytest.Config) -> None:
    real_gpu.put_in_place(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in real_gpu.summary():
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip combinations whose parts other tests cover, unless --sweep is given; run the longest files first.

    MOE_RT_TEST_ORDER="as given", and --gpu, keep the order of the arguments. Any other text shuffles the other files,
    the same text always in the same way.
    """
    if not config.getoption("--sweep"):
        left_out = [item for item in items if item.get_closest_marker("sweep")]
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)
    real_gpu.select(config, items)
    seed = os.environ.get("MOE_RT_TEST_ORDER")
    if seed == "as given" or config.getoption("gpu"):
        return
    place = {path: random.Random(f"{seed}{path.name}").random() if seed else 0.0 for path in {i.path for i in items}}
    longest = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (longest.get(item.path.name, len(LONGEST)), place[item.path]))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which saves a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def make_ranks() -> Iterator[Callable[[str, int], Ranks]]:
    """make_ranks(heap, size): ranks to run cases on; a module's cases share its processes.

    They end with the module: the thread of each gloo group that a case left open wakes 100 times a second.
    """
    pools: dict[int, ProcessRanks] = {}

    def make(heap: str, size: int) -> Ranks:
        if heap == "threads":
            return ThreadRanks(size)
        if heap == "loopback":
            return ThreadRanks(size, emulated_gpu.EmulatedGpu())
        if size not in pools:
            pools[size] = ProcessRanks(size)
        return pools[size]

    yield make
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
