"""The start of NVSHMEM: its settings, and the refusal, on every rank, of ranks that share a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from heap.nvshmem_job import Job
from support.ranks import ThreadRanks

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.memory import nvshmem_start

MULTICAST, NETWORK = "NVSHMEM_DISABLE_NVLS", "NVSHMEM_IB_ENABLE_IBGDA"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MULTICAST, NETWORK):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter("abababab")
    monkeypatch.setattr(nvshmem_start, "host", lambda: next(hosts))


def test_multicast_is_off_before_the_library_is_loaded() -> None:
    job = Job(2)
    job.allocate(100)
    assert [core.settings["load"].get(MULTICAST) for core in job.cores] == ["1", "1"]
    assert NETWORK not in os.environ, "on one host nobody would use it"


@pytest.mark.usefixtures("two_hosts")
def test_gpus_use_the_network_by_themselves() -> None:
    job = Job(2)
    job.allocate(100)
    assert [core.settings["init"].get(NETWORK) for core in job.cores] == ["1", "1"]


@pytest.mark.usefixtures("two_hosts")
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTICAST, "0")
    monkeypatch.setenv(NETWORK, "false")
    job = Job(2)
    job.allocate(100)
    for core in job.cores:
        assert (core.settings["init"][MULTICAST], core.settings["init"][NETWORK]) == ("0", "false")


def test_ranks_that_share_a_gpu_are_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_start, "mps_is_running", lambda: False)
    job = Job(4)
    job.gpus[3].uuid = job.gpus[1].uuid
    text = job.refuse(InvalidConfig)
    assert f"got ranks [1, 3] on one GPU, {job.gpus[1].uuid}, expected a GPU each" in text
    assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in text
    assert not job.cluster.of("init"), "nobody has started NVSHMEM"
    job.allocate(100, [0, 1, 2])


def test_settings_stay_as_they_are_if_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter("aab")
    monkeypatch.setattr(nvshmem_start, "host", lambda: next(hosts))
    monkeypatch.setattr(nvshmem_start, "mps_is_running", lambda: False)
    job = Job(3)
    for gpu in job.gpus:
        gpu.uuid = job.gpus[0].uuid
    job.refuse(InvalidConfig)
    assert NETWORK not in os.environ


def test_mps_lets_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, True, True, False])
    monkeypatch.setattr(nvshmem_start, "mps_is_running", lambda: next(answers))
    for expected_inits in (2, 0):
        job = Job(2)
        job.gpus[1].uuid = job.gpus[0].uuid
        if expected_inits:
            job.allocate(100)
        else:
            job.refuse(InvalidConfig)
        assert len(job.cluster.of("init")) == expected_inits


@pytest.mark.parametrize("without", range(4))
def test_every_gpu_that_ranks_share_needs_mps(monkeypatch: pytest.MonkeyPatch, without: int) -> None:
    mine = threading.local()
    monkeypatch.setattr(nvshmem_start, "mps_is_running", lambda: mine.rank != without)

    def look(group: ThreadGroup) -> None:
        mine.rank = group.rank
        nvshmem_start.require_own_gpus(group, [("host", f"gpu {rank // 2}") for rank in range(4)], 60.0)

    for error in ThreadRanks(4).outcomes(look):
        assert isinstance(error, InvalidConfig)
        first = without // 2 * 2
        assert f"got ranks {[first, first + 1]} on one GPU, gpu {without // 2}" in str(error)


@pytest.mark.usefixtures("two_hosts")
def test_hosts_may_number_their_gpus_alike() -> None:
    job = Job(2)
    job.gpus[1].uuid = job.gpus[0].uuid
    job.allocate(100)


def test_a_host_has_one_name() -> None:
    assert nvshmem_start.host() == nvshmem_start.host() != ""


def test_a_host_without_an_id_has_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvshmem_start, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(nvshmem_start.socket, "gethostname", lambda: "its name")
    assert nvshmem_start.host() == "its name"
    (tmp_path / "boot_id").write_text("its id\n")
    assert nvshmem_start.host() == "its id"


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:2", 2)])
def test_the_device_that_nvshmem_gets(monkeypatch: pytest.MonkeyPatch, device: str, index: int) -> None:
    """The library is loaded first: without it, questions about its state fail."""
    asked: list[str] = []
    core, cuda_core = ModuleType("nvshmem.core"), ModuleType("cuda.core")
    core.get_version = lambda: asked.append("version")  # type: ignore[attr-defined]
    cuda_core.Device = lambda index: (asked.append("device"), index)[1]  # type: ignore[attr-defined]
    package = ModuleType("nvshmem")
    package.core = core  # type: ignore[attr-defined]
    for module in (package, core, cuda_core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(nvshmem_start.torch.cuda, "current_device", lambda: 3)
    assert nvshmem_start.load(torch.device(device)) == (core, index)
    assert asked == ["version", "device"]
    core.get_version = lambda: {}["library"]  # type: ignore[attr-defined]
    with pytest.raises(
        InvalidConfig, match=f"got KeyError: 'library'; expected NVSHMEM's package, a CUDA driver and {device};"
    ):
        nvshmem_start.load(torch.device(device))


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        ((0, "", ""), True),
        ((0, "1234\n", ""), True),
        ((1, "", ""), False),
        ((0, "Cannot find MPS control daemon process\n", ""), False),
        ((0, "", "cannot connect"), False),
        (OSError("no program"), False),
        (subprocess.TimeoutExpired("nvidia-cuda-mps-control", 5), False),
    ],
    ids=str,
)
def test_answers_of_mps(monkeypatch: pytest.MonkeyPatch, answer: Any, runs: bool) -> None:
    asked: list[Any] = []

    def run(command: list[str], **how: Any) -> Any:
        asked.append((command, how))
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(nvshmem_start.shutil, "which", lambda name: name)
    monkeypatch.setattr(nvshmem_start.subprocess, "run", run)
    assert nvshmem_start.mps_is_running() is runs
    how = {"input": "get_server_list\n", "capture_output": True, "text": True, "timeout": 5}
    assert asked == [(["nvidia-cuda-mps-control"], how)]
    monkeypatch.setattr(nvshmem_start.shutil, "which", lambda name: None)
    assert not nvshmem_start.mps_is_running()
    assert len(asked) == 1, "a program that is not there is not started"


def test_mps_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_start.shutil, "which", lambda name: name)
    told = "Cannot find MPS control daemon process\n"
    monkeypatch.setattr(nvshmem_start.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, told, ""))
    assert not nvshmem_start.mps_is_running()
    monkeypatch.setattr(nvshmem_start.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "", ""))
    assert nvshmem_start.mps_is_running()
