"""The run of these tests on a real GPU, rehearsed: copies around ops, the choice of tests, a machine without a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import cases_call_options, cases_operands, cases_token_window
from conformance.test_halves import round_in_halves
from support import emulated_gpu, real_gpu
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.rounds import full_round
from support.routing import make_spec

from moe_rt.engine.cuda import CudaEngine
from moe_rt.engine.gpu import driver
from moe_rt.group.thread_ranks import ENVIRONMENT

pytestmark = pytest.mark.emulated("is about the run itself")


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copy every operand; check that ops see the copies, and count them."""
    seen: list[Any] = []
    dispatch = CudaEngine.dispatch

    def noted(engine: CudaEngine, *given: Any, **named: Any) -> Any:
        seen.extend(t.data_ptr() for t in given[:3])
        return dispatch(engine, *given, **named)

    monkeypatch.setattr(CudaEngine, "dispatch", noted)
    with real_gpu.copied_operands(always=True):
        yield seen


@pytest.mark.parametrize(
    ("case", "given"),
    [
        (full_round, (make_spec(2, dtype=torch.bfloat16), [12, 5], 1, "random")),
        (full_round, (make_spec(2, layout="tokens"), [12, 5], 1, "topk")),
        (round_in_halves, (make_spec(2), [12, 5], 1, "random")),
        (cases_token_window.rounds_from_windows, (make_spec(2, hidden=20), [12, 5])),
        (cases_call_options.outs, ()),
    ],
)
def test_rounds_through_copies(copying: list[int], case: Any, given: tuple[Any, ...]) -> None:
    ranks = ThreadRanks(2, EmulatedGpu())
    results = ranks.run(case, *given)
    assert copying
    if case is full_round:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(real_gpu._Copies, "are_needed", lambda copies, t: False)
            assert ranks.run(case, *given) == results


def test_copies_keep_what_operands_share(copying: list[int]) -> None:
    """`out` one word into a plan is refused although both are copies, and directly after it is accepted."""
    ranks = ThreadRanks(2, EmulatedGpu())
    texts = ranks.run(cases_operands.out_near_a_plan, "handle.recv_plan", -1)
    assert texts[0].startswith("InvalidInput: out: got memory of handle.recv_plan"), texts
    assert ranks.run(cases_operands.out_near_a_plan, "handle.recv_plan", 0) == ["no error"] * 2


def test_a_copy_is_laid_out_as_its_operand() -> None:
    """Views of one memory stay views of one, at the same offset and with the same strides."""
    copies = real_gpu._Copies(SimpleNamespace(_windows=None, device=torch.device("cpu")), always=True)  # type: ignore[arg-type]
    rows = torch.arange(40.0).view(8, 5)
    first, second = rows[1:, 1:], rows.t()[2:]
    there = copies.of(first), copies.of(second)
    for own, copy in zip((first, second), there, strict=True):
        assert torch.equal(own, copy)
        assert (own.stride(), own.storage_offset()) == (copy.stride(), copy.storage_offset())
        assert own.data_ptr() != copy.data_ptr()
    there[0].zero_()
    assert there[1][0, 1:].eq(0).all()
    assert copies.of("a tag") == "a tag"


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with a sentence that says what is missing, and with pytest's exit status for wrong usage."""
    monkeypatch.setattr(driver, "why_there_is_none", lambda: "; torch says: there is none")
    says = r"^--gpu: got no GPU that torch can use; torch says: there is none; --gpu-rehearsal=emulated runs"
    with pytest.raises(pytest.UsageError, match=says):
        real_gpu.put_in_place(SimpleNamespace(getoption=lambda name: "cuda"))  # type: ignore[arg-type]
    assert not real_gpu.is_in_place()


def test_in_place_of_the_emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's number of multiprocessors limits the GPU's, and the names of launches are kept for it. CUDA begins with
    the settings of virtual ranks."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    late = "; CUDA has begun without the settings of virtual ranks"
    monkeypatch.setattr(driver, "why_there_is_none", lambda: "" if set(ENVIRONMENT) <= set(os.environ) else late)
    monkeypatch.setattr(driver.Gpu, "__init__", lambda gpu, device: vars(gpu).update(num_sms=132, bulk_bytes=200))
    kernels = SimpleNamespace(launch=lambda launches, **how: None)
    monkeypatch.setattr(driver.Gpu, "kernels", lambda gpu, source, **how: kernels)
    for name in ("support.emulated_gpu.EmulatedGpu", "support.ranks.CASE_TIMEOUT_S"):
        monkeypatch.setattr(name, None)
    ends: list[Any] = []
    real_gpu.put_in_place(SimpleNamespace(getoption=lambda name: "cuda", add_cleanup=ends.append))  # type: ignore[arg-type]
    try:
        gpu: Any = emulated_gpu.EmulatedGpu(num_sms=6, threads=32, bulk_bytes=300)
        assert real_gpu.is_in_place()
        assert (gpu.num_sms, gpu.bulk_bytes) == (6, 200)
        assert (emulated_gpu.EmulatedGpu().num_sms, emulated_gpu.EmulatedGpu().bulk_bytes) == (132, 0)
        gpu.kernels("kernels.cu").launch([("dispatch_send", 3), ("dispatch_receive", 2)], stream=0)
        assert gpu.launched == ["dispatch_send", "dispatch_receive"]
    finally:
        ends[0]()


def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(real_gpu, "compile_kernels", lambda *what, **how: compiled.append(what))
    monkeypatch.setattr(real_gpu.CompilingGpu, "compiles_for", "sm_90a")
    ThreadRanks(1, real_gpu.CompilingGpu()).run(full_round, make_spec(1), [3], 1, "random")
    ((source, arch, defines),) = compiled
    assert (source, arch, defines["MOE_RT_HIDDEN"]) == ("kernels.cu", "sm_90a", 20)


def item(heap: str | None = None, imports: bool = False, marker: str | None = None) -> Any:
    mark = None if marker is None else SimpleNamespace(args=[marker])
    module = SimpleNamespace(**({"EmulatedGpu": None} if imports else {}))
    found = SimpleNamespace(get_closest_marker=lambda name: mark, module=module)
    if heap is not None:
        found.callspec = SimpleNamespace(params={"heap": heap})
    return found


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (item("loopback"), ""),
        (item("shm", imports=True), "has no rank on a GPU"),
        (item(imports=True), ""),
        (item(), "has no rank on a GPU"),
        (item("loopback", marker="pretends a clock"), "pretends a clock"),
    ],
)
def test_which_tests_run(found: Any, why: str) -> None:
    assert real_gpu.why_not(found) == why
