"""The gpucheck steps that can run on the emulated GPU pass, and detect faults."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from support.ranks import CASE_TIMEOUT_S

from moe_rt import Buffer
from moe_rt.group.thread_ranks import ThreadRanks
from moe_rt.lab.check import compiling, correctness, failures, layers, scale, training
from moe_rt.lab.check.layers import LayerSizes
from moe_rt.lab.check.steps import STEPS, Check, perform
from moe_rt.lab.testing.rounds import WrongOutput, check_bits, check_close


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limits: host threads on a busy machine take many times as long as a GPU."""
    for step in (correctness, scale, layers):
        monkeypatch.setattr(step, "TIMEOUT_S", CASE_TIMEOUT_S)
    for step in (correctness, scale):
        monkeypatch.setattr(step, "CASE_S", CASE_TIMEOUT_S)
    monkeypatch.setattr(failures, "PATIENCE_S", CASE_TIMEOUT_S)


class OneStream(EmulatedGpu):
    """All ranks launch into the same stream."""

    def stream(self) -> int:
        return 7


@pytest.mark.parametrize("size", [1, 2, 3])
def test_correctness(size: int) -> None:
    record = perform(STEPS["correctness"], Check(EmulatedGpu(), quick=True, seconds=CASE_TIMEOUT_S, sizes=(size,)))
    assert (record["result"], record["error"]) == ("ok", "")


@pytest.mark.parametrize(
    "name",
    ["many tokens", "large rows", "large rows with scales", "large rows as fp8", "no tokens", "scattered placement"],
)
def test_cases_of_the_full_run(name: str) -> None:
    (case,) = [case for case in correctness.cases(2, quick=False) if case.name == name]
    correctness.run_case(EmulatedGpu(), 2, case, 1 if "large" in name else 3, seconds=CASE_TIMEOUT_S)


def test_kernels_are_compiled_for_possible_sizes() -> None:
    for variant in (*compiling.VARIANTS, *compiling.NEEDED, *compiling.GIN_VARIANTS):
        assert variant.topk <= 32, variant
        assert variant.hidden > variant.topk or variant.hidden == variant.topk == 0, variant


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("size", correctness.SIZES)
def test_no_two_cases_check_the_same(size: int, quick: bool) -> None:
    assert (correctness.SIZES, correctness.QUICK_SIZES) == ((1, 2, 4, 8), (1, 2))
    found = correctness.cases(size, quick)
    assert len({repr(replace(case, name="")) for case in found}) == len({case.name for case in found}) == len(found)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the sizes of the steps that are for large ones."""
    for name, value in {"HIDDEN": 64, "EXPERTS": 8, "TOPK": 2, "MANY": 60, "QUICK_LOADS": ((2, 8), (1, 600))}.items():
        monkeypatch.setattr(scale, name, value)
    monkeypatch.setattr(training, "LayerSizes", lambda: LayerSizes(64, 32, 8, 2, 16))


@pytest.mark.parametrize("name", ["smoke", "scale", "training"])
def test_small_steps(small: None, name: str) -> None:
    record = perform(STEPS[name], Check(EmulatedGpu(), quick=True, seconds=CASE_TIMEOUT_S))
    assert (record["result"], record["error"]) == ("ok", "")
    rows = {"smoke": 3, "scale": 9, "training": 10}
    said = {"smoke": "3 rounds equal", "scale": "9 comparisons equal, 0 not", "training": "10 tensors agree"}
    assert len(record["tables"][0]["rows"]) == rows[name]
    assert record["detail"].endswith(said[name])


def test_scale_tries_the_given_numbers_of_ranks(small: None) -> None:
    record = perform(STEPS["scale"], Check(EmulatedGpu(), quick=True, seconds=CASE_TIMEOUT_S, sizes=(2,)))
    assert {row[0] for row in record["tables"][0]["rows"]} == {2}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smoke", "WrongOutput: out"),
        ("scale", "WrongOutput: turn 0, rank 0: out"),
        ("training", "under autocast, out: got a difference"),
    ],
)
def test_wrong_output_of_small_steps_is_noticed(
    small: None, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    combine = Buffer.combine
    monkeypatch.setattr(Buffer, "combine", lambda self, *args, **how: combine(self, *args, **how) + 1)
    record = perform(STEPS[name], Check(EmulatedGpu(), quick=True, seconds=CASE_TIMEOUT_S))
    assert record["result"] == "failed"
    assert said in record["error"]


def test_smoke_tries_launches_that_do_not_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only that works, the step says so; the variable is afterwards what it was."""

    def run_case(*arguments: Any, **how: Any) -> None:
        if os.environ.get(scale.NOT_EARLY) != "0":
            raise WrongOutput("out")

    monkeypatch.setattr(scale, "run_case", run_case)
    for before in (None, "1"):
        monkeypatch.delenv(scale.NOT_EARLY, raising=False)
        if before is not None:
            monkeypatch.setenv(scale.NOT_EARLY, before)
        check = Check("cpu", quick=True)
        scale.check_smoke(check)
        assert len(check.failures) == 3
        assert check.details[0] == f"a round is right with {scale.NOT_EARLY}=0 only"
        assert os.environ.get(scale.NOT_EARLY) == before


def test_an_optimiser_that_learns_nothing_is_noticed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LEARNING_RATE", 0.0)
    with pytest.raises(WrongOutput, match="AdamW: got a loss of"):
        training.optimised("cpu", LayerSizes(64, 32, 8, 2, 16), 2)


def test_wrong_output_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = Buffer.combine
    monkeypatch.setattr(Buffer, "combine", lambda self, *args: combine(self, *args) + 1)
    record = perform(STEPS["correctness"], Check(EmulatedGpu(), quick=True, seconds=CASE_TIMEOUT_S, sizes=(2,)))
    assert record["result"] == "failed"
    assert "WrongOutput: out: " in record["error"]


def test_chains() -> None:
    correctness.run_chain(EmulatedGpu(), 60, seconds=CASE_TIMEOUT_S)


def test_wrong_output_of_a_chain_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "experts", lambda rows, rank: rows)
    with pytest.raises(WrongOutput, match="pair 49"):
        correctness.run_chain(EmulatedGpu(), 60, seconds=CASE_TIMEOUT_S)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "SLACK_S", 100.0)  # a stand-in's delay has no meaning
    check = Check(EmulatedGpu(num_sms=8))
    failures.check(check)
    assert not check.failures
    assert len(check.tables[0].rows) == 4


def test_error_of_a_shared_stream() -> None:
    assert failures.shared_stream(OneStream()) == "InvalidConfig on the second rank"
    with pytest.raises(WrongOutput):
        failures.shared_stream(EmulatedGpu())


def test_a_stream_is_awaited_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the stream of a rank ends when the rank has begun an op, or after PATIENCE_S."""
    streams: dict[int, int] = {}
    buffer: Any = SimpleNamespace(_engine=SimpleNamespace(_segments=SimpleNamespace(streams=streams)))
    times = iter([0.0, 0.0, 1.0])
    clock = SimpleNamespace(monotonic=lambda: next(times), sleep=lambda s: streams.update({1: 7}))
    monkeypatch.setattr(failures, "time", clock)
    failures._await_stream_of(1, buffer)
    assert next(times) == 1.0, "it found the stream after one sleep"
    times = iter([0.0, failures.PATIENCE_S - 1.0, failures.PATIENCE_S])
    failures._await_stream_of(0, buffer)
    assert not list(times)


def test_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DTYPES", (torch.bfloat16,))  # tests/layer compiles the other
    check = Check(EmulatedGpu())
    layers.check(check, LayerSizes(64, 32, 8, 2, 16))
    assert not check.failures
    names = {row[0] for row in check.tables[0].rows}
    assert len(check.tables[0].rows) == 5 * len(names)
    assert check.details[0] == f"{5 * len(names)} tensors agree"
    assert names == {f"{how} torch.bfloat16" for how in ("eager", "compiled")} | {
        "made under meta",
        "made under cpu",
        "experts without tokens",
    }
    wrong = {"out": torch.ones(2)}
    with pytest.raises(WrongOutput, match=r"out: got a difference of 0\.5"):
        layers.compare("x", wrong, {"out": torch.tensor([2.0, 1.0])}, 1e-3, [])


def test_idle_experts_without_zeros_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.forward_backward

    def wrong(layer: Any, call: Any, x: Any) -> dict[str, Any]:
        found = right(layer, call, x)
        found["experts.down_proj"][-1, 0, 0] = 1e-30
        return found

    monkeypatch.setattr(layers, "forward_backward", wrong)
    with pytest.raises(WrongOutput, match=r"down_proj: got a gradient that is not zero"):
        layers.with_idle_experts(EmulatedGpu(), LayerSizes(64, 32, 8, 2, 16), [])


def test_first_error_of_ranks_is_raised() -> None:
    first: queue.Queue[threading.Thread] = queue.Queue()

    def work(group: Any) -> None:
        if group.rank == 1:
            first.put(threading.current_thread())
            raise KeyError("first")
        first.get().join(CASE_TIMEOUT_S)
        raise ValueError("second")

    with pytest.raises(KeyError, match="first"):
        ThreadRanks(2, "cpu").run(work)


def test_rank_that_fails_at_once_does_not_fail_the_others() -> None:
    """A rank that fails immediately does not fail the others, which may not have left the first barrier."""

    def work(group: Any) -> int:
        if group.rank == 0:
            raise KeyError("at once")
        return group.rank

    for _ in range(200):
        first, *others = ThreadRanks(4).outcomes(work)
        assert isinstance(first, KeyError)
        assert others == [1, 2, 3]


def test_rank_that_does_not_end_is_located() -> None:
    over = threading.Event()

    def sleeps_here(group: Any) -> int:
        if group.rank == 1:
            over.wait(CASE_TIMEOUT_S)
        return group.rank

    with pytest.raises(TimeoutError, match=r"(?s)rank 1 within 3 s.*sleeps_here"):
        ThreadRanks(2, "cpu").run(sleeps_here, seconds=3.0)
    over.set()


def test_bits_are_compared() -> None:
    nan = torch.tensor([float("nan"), 0.0], dtype=torch.bfloat16)
    check_bits("same", nan, nan.clone())
    with pytest.raises(WrongOutput, match=r"sign: 1 of 2 elements differ, first at \(1,\)"):
        check_bits("sign", nan, torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16))
    with pytest.raises(WrongOutput, match="shape"):
        check_bits("shape", nan, nan[:1])
    with pytest.raises(WrongOutput, match="close"):
        check_close("close", torch.ones(2), torch.zeros(2), 20)
