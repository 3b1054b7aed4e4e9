"""Run steps within one time budget, and assemble the document of the run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from moe_rt.errors import InvalidConfig
from moe_rt.info import machine_card
from moe_rt.lab.check.steps import STEPS, Check, Step

BUDGET_S, LEAST_S, NUM_JOBS = 470.0, 10.0, 4
_INSTEAD = "without a GPU the kernels can be compiled: moe-rt gpucheck --compile-only --arch sm_90a"
_OF_CUDA_13 = ("nvidia-cuda-nvrtc", "nvidia-nvshmem-cu13", "nvshmem4py-cu13")
_OF_CUDA_12 = ("nvidia-cuda-nvrtc-cu12", "nvidia-nvshmem-cu12", "nvshmem4py-cu12")
_PACKAGES = ("cuda-bindings", *_OF_CUDA_13, *_OF_CUDA_12, "triton", "vllm")
_QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"

Perform = Callable[[Step, Check], dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """Options and limits of one run of the steps.

    Attributes:
        perform: runs one step and returns its record.
        device, quick, sizes, nproc: see Check.
        budget_s: seconds for all steps together; a step that finds less than LEAST_S of them left is skipped.
        patience: factor on the time limit of each step.
        num_jobs: number of steps that run at the same time, unless they measure time.
        skipped: steps that cannot run here, and why.
        announce: called with the name and title of each step that begins.
        save: called with all records so far whenever a step has ended.
    """

    perform: Perform
    device: Any
    quick: bool = False
    sizes: tuple[int, ...] | None = None
    nproc: int = 1
    budget_s: float = BUDGET_S
    patience: float = 1.0
    num_jobs: int = 1
    skipped: Mapping[str, str] = field(default_factory=dict)
    announce: Callable[[str], None] = lambda text: None
    save: Callable[[list[dict[str, Any]]], None] = lambda records: None

    def run(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Run the steps in the order of STEPS and return their records in that order.

        The first step runs by itself, since nothing else is worth its time if it fails. Steps that measure no time come
        next, several side by side. The timed ones run last, one after another.
        """
        chosen = [step for step in STEPS.values() if step.name in names]
        deadline = time.monotonic() + self.budget_s
        found: dict[str, dict[str, Any]] = {}

        def run_one(step: Step) -> None:
            record = self._record(step, deadline)
            with saving:
                found[step.name] = record
                self.save(in_order())

        def in_order() -> list[dict[str, Any]]:
            return [found[step.name] for step in chosen if step.name in found]

        saving = threading.Lock()
        first, others = chosen[:1], chosen[1:]
        for step in first:
            run_one(step)
        with ThreadPoolExecutor(self.num_jobs) as pool:
            list(pool.map(run_one, (step for step in others if not step.timed)))
        for step in others:
            if step.timed:
                run_one(step)
        return in_order()

    def _record(self, step: Step, deadline: float) -> dict[str, Any]:
        begin = time.monotonic()
        seconds = min(self.patience * step.seconds, deadline - begin)
        check = Check(self.device, self.quick, seconds, self.sizes, self.nproc)
        if why := self._why_not(step, seconds):
            check.details.append(why)
            record = check.record(step.name, "skipped", 0.0)
        else:
            self.announce(f"{step.name}: {step.title}")
            record = self.perform(step, check)
        record["seconds"] = round(time.monotonic() - begin, 3)
        return record

    def _why_not(self, step: Step, seconds: float) -> str:
        if step.name in self.skipped:
            return self.skipped[step.name]
        if seconds < LEAST_S:
            return f"no time left of the {self.budget_s:.0f} s for all steps; run it by itself with --only"
        return ""


def document(records: list[dict[str, Any]], gpu: dict[str, Any], *, emulated: bool = False) -> dict[str, Any]:
    """Return the document of a run, as report.json has it. `emulated` records that no GPU was used."""
    machine = {**gpu, **machine_card(), **_versions()}
    ok = all(record["result"] != "failed" for record in records)
    return {
        "ok": ok,
        "emulated": emulated,
        "command": " ".join(["moe-rt", *sys.argv[1:]]),
        "machine": machine,
        "steps": records,
    }


def gpu_card(device: str, nproc: int = 1) -> dict[str, Any]:
    """Properties of the GPU.

    Raises:
        InvalidConfig: torch cannot use the device, or any, or finds fewer than nproc.
    """
    from moe_rt.engine.gpu.driver import Gpu, why_there_is_none

    count = torch.cuda.device_count()
    if torch.version.cuda is None:
        raise InvalidConfig(f"torch: got {torch.__version__}, a build without CUDA, expected one with it; {_INSTEAD}")
    if why := why_there_is_none():  # includes a driver that is too old, whose GPUs are still counted
        raise InvalidConfig(f"device: got {device}, but torch can use no GPU here{why}; {_INSTEAD}")
    if device not in ("cuda", *(f"cuda:{index}" for index in range(count))):
        raise InvalidConfig(f"device: got {device}, expected cuda:0 to cuda:{count - 1}")
    if nproc > count:
        raise InvalidConfig(
            f"--nproc: got {nproc}, but torch finds {count} GPUs here; CUDA_VISIBLE_DEVICES may hide some"
        )
    gpu = Gpu(device)
    properties = torch.cuda.get_device_properties(gpu.device)
    card = {"gpu": gpu.name, "arch": gpu.arch, "sms": gpu.num_sms, "gpu_gib": round(properties.total_memory / 2**30, 1)}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", f"--id=GPU-{gpu.uuid}"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
        card.update(zip(_QUERY.split(","), answer.split(", "), strict=False))
    return card


def _versions() -> dict[str, str]:
    found = {"cuda_of_torch": str(torch.version.cuda)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
