"""References of gpucheck's steps equal plain loops, faults are named, and measurements come from the right events."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpucheck.fake_cuda_timing import device_event

from moe_rt.buffer.buffer import Buffer
from moe_rt.errors import CapacityOverflow, PeerTimeout
from moe_rt.lab.check import emulated, failures, graphs, layers, measuring, network, pairs, scale, timing, training
from moe_rt.lab.check.layers import LayerSizes
from moe_rt.lab.check.measuring import RANGE, Load, host_waits, kernels
from moe_rt.lab.check.pairs import launch_turns
from moe_rt.lab.check.scale import Drawn
from moe_rt.lab.check.steps import Check, Skipped, Step, perform
from moe_rt.lab.testing.rounds import WrongOutput, make_spec

CPU = torch.device("cpu")
LOADS = [Load(1, 5, 3, 2, 4), Load(2, 4, 8, 3, 6), Load(4, 7, 5, 1, 8), Load(3, 6, 4, 6, 9)]
SMALL = LayerSizes(64, 32, 8, 2, 16)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.ranks} ranks")
def test_drawn_inputs(load: Load) -> None:
    """A seed always gives the same; each token has distinct experts, and each rank its own tokens."""
    drawn, again, other = (Drawn.of(load, seed, CPU) for seed in (1, 1, 2))
    for lists in (drawn.xs, drawn.idx, drawn.weights):
        assert len(lists) == load.ranks
    assert all(torch.equal(a, b) for a, b in zip(drawn.xs, again.xs, strict=True))
    assert not torch.equal(drawn.xs[0], other.xs[0])
    for rank in range(load.ranks):
        assert (drawn.xs[rank].shape, drawn.xs[rank].dtype) == ((load.tokens, load.hidden), torch.bfloat16)
        assert drawn.idx[rank].shape == drawn.weights[rank].shape == (load.tokens, load.topk)
        assert all(len(set(row)) == load.topk and max(row) < load.experts for row in drawn.idx[rank].tolist())
        assert ((drawn.weights[rank] >= 0) & (drawn.weights[rank] < 1)).all()
        assert rank == 0 or not torch.equal(drawn.xs[rank], drawn.xs[0])


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.ranks} ranks")
def test_rows_that_ranks_receive(load: Load) -> None:
    """Rows are ordered by expert, source rank and token; offs ends each expert's."""
    drawn, each = Drawn.of(load, 3, CPU), load.experts // load.ranks
    for rank, (tokens, offs) in enumerate(scale.received_rows(drawn, load)):
        expected: list[int] = []
        ends: list[int] = []
        for expert in range(rank * each, (rank + 1) * each):
            for source in range(load.ranks):
                expected += [source * load.tokens + token for token in range(load.tokens)
                             if expert in drawn.idx[source][token]]  # fmt: skip
            ends.append(len(expected))
        assert tokens.tolist() == expected
        assert (offs.tolist(), offs.dtype) == (ends, torch.int32)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.ranks} ranks")
def test_outputs_of_experts_that_return_their_rows(load: Load) -> None:
    """A rank's partial is summed in fp32 in the order of experts, rounded to bf16, and added in the order of ranks."""
    drawn, each = Drawn.of(load, 4, CPU), load.experts // load.ranks
    for rank in range(load.ranks):
        got = scale.combined(drawn, rank, load)
        assert got.dtype == torch.bfloat16
        for token, row in enumerate(drawn.idx[rank].tolist()):
            out = torch.zeros(load.hidden)
            for owner in range(load.ranks):
                partial = torch.zeros(load.hidden)
                for expert in sorted(e for e in row if e // each == owner):
                    weight = drawn.weights[rank][token, row.index(expert)]
                    partial = partial + weight * drawn.xs[rank][token].float()
                out = out + partial.bfloat16().float()
            assert torch.equal(got[token], out.bfloat16())


def test_inputs_are_on_the_device_of_ranks() -> None:
    """They are there whatever torch's default device is."""
    load, buffer = LOADS[1], SimpleNamespace(spec=make_spec(2))
    with torch.device("meta"):
        drawn = Drawn.of(load, 1, CPU)
        made = [*drawn.xs, *drawn.idx, *drawn.weights, scale.combined(drawn, 0, load)]
        made += [t for rows in scale.received_rows(drawn, load) for t in rows]
        made += [*failures._inputs(buffer, CPU), measuring.Flush(CPU, 8)._memory]  # type: ignore[arg-type]
    assert {t.device.type for t in made} == {"cpu"}


def test_large_rounds_are_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns the rows of all ranks; what is wrong is named with its turn and rank."""
    load = Load(2, 6, 16, 2, 4)
    assert scale.compare_with_torch("cpu", load, seconds=60.0) == 2 * 6 * 2
    dispatch, combine = Buffer.dispatch, Buffer.combine

    def other_rows(self: Buffer, *given: Any) -> Any:
        rows, weights, handle = dispatch(self, *given)
        return (rows * 2 if self.rank == 1 else rows), weights, handle

    def other_out(self: Buffer, *given: Any) -> Any:
        return combine(self, *given) * (2 if self.rank == 0 else 1)

    monkeypatch.setattr(Buffer, "combine", other_out)
    with pytest.raises(WrongOutput, match="turn 0, rank 0: out"):
        scale.compare_with_torch("cpu", load, seconds=60.0)
    monkeypatch.setattr(Buffer, "combine", combine)
    monkeypatch.setattr(Buffer, "dispatch", other_rows)
    with pytest.raises(WrongOutput, match=r"turn 0, rank (0: out|1: recv_x)"):
        scale.compare_with_torch("cpu", load, seconds=60.0)


def test_rings_are_compared_from_512_tokens_of_one_rank_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []

    def compare(device: Any, load: Load, seconds: float) -> int:
        compared.append(load)
        return 0

    monkeypatch.setattr(scale, "LOADS", ((1, 511), (1, 512), (2, 512)))
    monkeypatch.setattr(scale, "transports", lambda quick: [])
    monkeypatch.setattr(scale, "from_token_windows", lambda device, size: None)
    monkeypatch.setattr(scale, "compare_with_torch", compare)
    check = Check("cpu")
    scale.check(check)
    assert not check.failures
    assert [(load.ranks, load.tokens, load.num_sms) for load in compared] == [
        (1, 511, None), (1, 512, None), (1, 512, 8), (2, 512, None),
    ]  # fmt: skip


def test_dropped_rows_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "read", lambda tensor: 3)
    with pytest.raises(WrongOutput, match=r"rank \d: got 3 dropped rows, expected capacity for all"):
        scale.compare_with_torch("cpu", Load(2, 2, 8, 2, 4), seconds=60.0)


def test_another_row_of_a_token_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scale.from_token_windows("cpu", 2)
    window = Buffer.token_window
    monkeypatch.setattr(Buffer, "token_window", lambda self, n: window(self, n).clone())
    scale.from_token_windows("cpu", 2)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
    with pytest.raises(WrongOutput, match="recv_x of a token window"):
        scale.from_token_windows("cpu", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dense_loop_is_a_layer(dtype: torch.dtype) -> None:
    """Every expert computes every token in fp32; weights of the chosen ones are normalised."""
    layer, x = layers.make_layer("cpu", dtype, SMALL)
    assert (x.shape, x.dtype, layer.config.timeout_s) == ((16, 64), dtype, 20.0)
    again, same = layers.make_layer("cpu", dtype, SMALL)
    assert torch.equal(x, same)
    assert torch.equal(layer.router.weight, again.router.weight)
    found = layers.dense_results(layer, x)
    assert list(found) == ["out", "x", *dict(layer.named_parameters())]
    scores = (x.float() @ layer.router.weight.float().T).softmax(-1)
    for token in range(16):
        top = scores[token].topk(2)
        out = torch.zeros(64)
        for score, expert in zip(top.values, top.indices, strict=True):
            gate, up = (x[token].float() @ layer.experts.gate_up_proj[expert].float().T).chunk(2)
            y = (F.silu(gate) * up) @ layer.experts.down_proj[expert].float().T
            out = out + score / top.values.sum() * y
        assert torch.allclose(found["out"][token].float(), out, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)
    grad = torch.linspace(-1, 1, 64).to(dtype).expand(16, 64)
    x = x.clone().requires_grad_()
    expected = torch.autograd.grad(layers._dense(layer, x), x, grad)[0]
    assert torch.equal(found["x"], expected)
    for each in (layer, again):
        each.buffer.close()


@pytest.mark.parametrize(
    ("got", "fine"), [([2.0, 1.0], True), ([2.0, 1.5], True), ([2.0, 1.51], False), ([2.0, float("nan")], False)]
)
def test_differences_are_relative_to_the_largest_value(got: list[float], fine: bool) -> None:
    rows: list[list[Any]] = []
    expected = {"x": torch.tensor([-2.0, 1.0]).abs(), "out": torch.tensor([-4.0])}
    found = {"x": torch.tensor(got), "out": torch.tensor([-4.0]), "more": torch.zeros(1)}
    if fine:
        layers.compare("a layer", found, expected, 0.25, rows)
        assert rows == [["a layer", "x", abs(got[1] - 1) / 2, 0.25], ["a layer", "out", 0.0, 0.25]]
    else:
        with pytest.raises(WrongOutput, match=r"a layer, x: got a difference of \S+, expected at most 0\.25"):
            layers.compare("a layer", found, expected, 0.25, rows)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is done with buffers at their end."""
    seen: list[str] = []
    for name in ("check", "close"):
        work = getattr(Buffer, name)

        def noted(self: Buffer, name: str = name, work: Any = work) -> None:
            seen.append(name)
            work(self)

        monkeypatch.setattr(Buffer, name, noted)
    return seen


def test_layers_of_steps_are_closed(buffers: list[str]) -> None:
    """Errors of the device are asked for before a layer is closed, where more than one op has run."""
    rows: list[list[Any]] = []
    layers.made_under("cpu", "cpu", SMALL, rows)
    assert buffers == ["close"] * 2
    buffers.clear()
    layers.with_idle_experts("cpu", SMALL, rows)
    training.under_autocast("cpu", SMALL, rows)
    assert buffers == ["close"] * 2
    buffers.clear()
    training.optimised("cpu", SMALL, 2)
    assert buffers == ["check", "close"]
    buffers.clear()
    training.on_virtual_ranks("cpu", SMALL, rows, seconds=60.0)
    assert sorted(buffers) == ["check"] * 2 + ["close"] * 3
    named = {row[0]: [r[1:2] + r[3:] for r in rows if r[0] == row[0]] for row in rows}
    tensors = ("out", "x", "router.weight", "experts.gate_up_proj", "experts.down_proj")
    bf16 = {name: [[tensor, 4e-2] for tensor in tensors]
            for name in ("experts without tokens", "under autocast", "on 2 virtual ranks")}  # fmt: skip
    assert {name: sorted(r) for name, r in named.items()} == {
        name: sorted(r) for name, r in ({"made under cpu": [[tensor, 1e-4] for tensor in tensors]} | bf16).items()
    }


def test_idle_experts_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens go to the first experts, however the router is drawn."""
    seen: list[torch.Tensor] = []
    forward_backward = layers.forward_backward

    def recorded(layer: Any, call: Any, x: torch.Tensor) -> Any:
        scores = x.float() @ layer.router.weight.float().T
        seen.append(scores.topk(2).indices.sort().values)
        return forward_backward(layer, call, x)

    monkeypatch.setattr(layers, "forward_backward", recorded)
    layers.with_idle_experts("cpu", SMALL, [])
    (chosen,) = seen
    assert torch.equal(chosen, torch.tensor([[0, 1]]).expand_as(chosen))


@pytest.mark.parametrize(("losses", "said"), [([4.0, 2.0, 1.0], "loss 4 to 1 in 3 steps"), ([2.0, 1.0, 2.0], None)])
def test_an_optimiser_must_lower_the_loss(losses: list[float], said: str | None, monkeypatch: Any) -> None:
    """The first loss is compared with the last. Gradients are set to none before each step."""
    left = iter(losses)
    seen: list[str] = []

    class Layer(torch.nn.Module):
        buffer = SimpleNamespace(check=lambda: seen.append("check"), close=lambda: seen.append("close"))

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            assert self.weight.grad is None
            return torch.sin(x) + next(left) ** 0.5 + 0 * self.weight, None

    layer = Layer()
    monkeypatch.setattr(training, "make_layer", lambda *given: (layer, torch.ones(2, 2)))
    stepped: list[float] = []
    adamw = torch.optim.AdamW

    class Optimizer(adamw):  # type: ignore[misc,valid-type]
        def step(self) -> None:
            stepped.append(self.param_groups[0]["lr"])
            assert layer.weight.grad is not None

    monkeypatch.setattr(torch.optim, "AdamW", Optimizer)
    if said is None:
        with pytest.raises(WrongOutput, match="AdamW: got a loss of 2 after 3 steps, expected less than 2"):
            training.optimised("cpu", SMALL, 3)
    else:
        assert training.optimised("cpu", SMALL, 3) == said
    assert stepped == [1e-3] * 3
    assert seen == ["check", "close"]


def test_ranks_of_training_have_their_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts and tokens are split among ranks; the router is on each, and its gradients are summed."""
    seen: dict[int, Any] = {}
    forward_backward = layers.forward_backward

    def recorded(layer: Any, call: Any, x: torch.Tensor) -> Any:
        seen[len(x)] = seen.get(len(x), 0) + 1
        return forward_backward(layer, call, x)

    monkeypatch.setattr(training, "forward_backward", recorded)
    training.on_virtual_ranks("cpu", SMALL, [], seconds=60.0)
    assert seen == {16: 1, 8: 2}
    whole = torch.arange(12.0).view(6, 2)
    assert torch.equal(training._share(whole, torch.Size((2, 2)), 1), whole[2:4])
    assert training._share(whole, whole.shape, 1) is whole


@pytest.mark.parametrize(
    ("seconds", "fine"),
    [(1.8, False), (1.81, True), (4.99, True), (5.0, False)],
    ids=["early", "soon", "late", "never"],
)
def test_when_a_missing_peer_is_reported(seconds: float, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout of 2 s is noticed neither much earlier nor much later."""
    outcomes = [(PeerTimeout("x", rank=0), seconds), (CapacityOverflow("x", rank=1), 0.0)]
    monkeypatch.setattr(failures, "ThreadRanks", lambda *given: SimpleNamespace(run=lambda work: outcomes))
    if fine:
        said = f"PeerTimeout after {seconds:.2f} s, and CapacityOverflow for who came later"
        assert failures.late_peer("cpu") == said
    else:
        with pytest.raises(WrongOutput, match=rf"PeerTimeout: got it after {seconds:.2f} s, expected it after 2 s"):
            failures.late_peer("cpu")


def test_errors_that_are_awaited() -> None:
    """The first error of a check is returned; without one, a rank has waited for nothing."""
    answers = iter([None, None, PeerTimeout("late", rank=1)])

    def check() -> None:
        if error := next(answers, None):
            raise error

    buffer: Any = SimpleNamespace(check=check, rank=1)
    error = failures._next_error(buffer, 60.0)
    assert isinstance(error, PeerTimeout)
    begin = time.monotonic()
    with pytest.raises(WrongOutput, match=r"rank 1: got no error within 0\.02 s"):
        failures._next_error(buffer, 0.02)
    assert time.monotonic() - begin >= 0.02
    failures._expect(error, PeerTimeout)
    with pytest.raises(WrongOutput, match=r"got PeerTimeout: late.*; expected CapacityOverflow") as raised:
        failures._expect(error, CapacityOverflow)
    assert raised.value.__cause__ is error
    with pytest.raises(WrongOutput, match="got NoneType: None; expected CapacityOverflow"):
        failures._expect(None, CapacityOverflow)


def test_a_rank_that_does_not_come_to_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(work: Any, seconds: float) -> None:
        raise threading.BrokenBarrierError

    monkeypatch.setattr(graphs, "ThreadRanks", lambda *given: SimpleNamespace(run=run))
    with pytest.raises(WrongOutput, match="a rank did not come to capture or to replay"):
        graphs.run_graph("cpu", 1, 1)


def test_a_machine_without_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: {"nvshmem": None}[name])
    with pytest.raises(Skipped, match=r"NVSHMEM's package is not installed; pip install "):
        network.check(Check("cuda:0"))


def mark(name: str, start: float, end: float, device: str = "CPU", annotation: bool = False) -> Any:
    return device_event(name, start, end, device, annotation)


RANGES = [mark(RANGE, 10, 20, annotation=True), mark(RANGE, 10, 30, "CUDA", True), mark("kernel", 12, 13, "CUDA")]


@pytest.mark.parametrize(
    ("name", "waits"),
    [("cudaStreamSynchronize", True), ("cuStreamSynchronize", True), ("cudaDeviceSynchronize", True),
     ("cudaEventSynchronize", True), ("cuCtxSynchronize", True), ("cuStreamWaitValue", True), ("cudaMemcpy", True),
     ("cuMemcpyDtoH", True), ("cuMemcpyDtoH_v2", True), ("cudaMemcpyAsync", False), ("cudaLaunchKernel", False),
     ("aten::StreamSynchronize", False), ("cudaStreamSynchronizeLater", False)],
)  # fmt: skip
def test_calls_that_wait_for_the_device(name: str, waits: bool) -> None:
    """They count if they begin inside the range, its ends included, on the host."""
    for start, inside in ((9, False), (10, True), (20, True), (21, False)):
        assert host_waits([*RANGES, mark(name, start, 40)]) == ([name] if waits and inside else [])
    on_device = name.replace("DtoH", "HtoD")
    assert host_waits([*RANGES, mark(on_device, 12, 13, "CUDA")]) == []


def test_copies_from_the_device_are_waits_too() -> None:
    events = [*RANGES, mark("Memcpy DtoH (Device -> Pageable)", 1, 2, "CUDA"), mark("Memcpy HtoD", 1, 2, "CUDA")]
    assert host_waits(events) == ["Memcpy DtoH (Device -> Pageable)"]
    assert [e.name for e in kernels(events)] == ["kernel", events[3].name, events[4].name]
    for ranges in ([], [RANGES[0]] * 2):
        with pytest.raises(WrongOutput, match=f"the profiler: got {len(ranges)} ranges, expected 1"):
            host_waits([*ranges, *RANGES[1:]])
    with pytest.raises(WrongOutput, match="the profiler: got no kernels, expected some; CUPTI may lack the permission"):
        kernels(RANGES[:2])


def test_a_timer_and_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)
            self.recorded = 0

        def record(self) -> None:
            self.recorded += 1

        def elapsed_time(self, other: Any) -> int:
            assert (self, other) == (made[0], made[1])
            return 250

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = measuring.Timer()
    timer.start()
    assert [event.recorded for event in made] == [1, 0]
    timer.stop()
    assert [event.recorded for event in made] == [1, 1]
    assert timer.seconds() == 0.25
    flush = measuring.Flush(CPU, 64)
    flush._memory.fill_(7)
    flush.run()
    assert (flush._memory.numel(), flush._memory.dtype, int(flush._memory.sum())) == (64, torch.uint8, 0)


def test_launches_without_their_other_half_are_no_measurement() -> None:
    """Launches of a name have a turn for every rank, in order of time."""
    names = list(measuring.ROLES)
    events = [mark(name, 100 * turn + 10 * number, 100 * turn + 10 * number + 5, "CUDA")
              for turn in range(pairs.WARM_UP + 2) for number, name in enumerate(names)]  # fmt: skip
    turns = launch_turns(list(reversed([*events, mark("dispatcher", 0, 1), mark("combine_sums", 3, 4)])), 1)
    assert list(turns) == ["combine_receive", "combine_send", "combine_sums", "dispatch_receive", "dispatch_send"]
    assert turns.pop("combine_sums") == []
    first = 100.0 * pairs.WARM_UP
    assert turns["dispatch_receive"] == [[(first + 10, first + 15)], [(first + 110, first + 115)]]
    assert timing.of_roles(turns) == pytest.approx(
        {"dispatch_send": 5e-6, "dispatch_receive": 5e-6, "combine_send": 5e-6, "combine_receive": 5e-6}
    )
    del turns["dispatch_receive"][1]
    with pytest.raises(ValueError, match="shorter"):
        timing.of_roles(turns)


def failing(check: Check) -> None:
    check.say("begun")
    raise KeyError("outside of a part")


def skipping(check: Check) -> None:
    check.say("begun")
    raise Skipped("not here")


def passing(check: Check) -> None:
    check.say("one")
    check.say("two")
    check.begin("Table", ["a"], "a note").append([1])


@pytest.mark.parametrize(
    ("work", "result", "detail"), [(failing, "failed", "begun"), (skipping, "skipped", "begun; not here"),
                                   (passing, "ok", "one; two")],
)  # fmt: skip
def test_what_becomes_of_a_step(work: Any, result: str, detail: str) -> None:
    record = perform(Step("name", f"{__name__}:{work.__name__}", 60, "title"), Check("cpu"))
    assert 0 <= record.pop("seconds") < 60
    error, tables = record.pop("error"), record.pop("tables")
    assert record == {"step": "name", "result": result, "detail": detail}
    assert error.endswith("KeyError: 'outside of a part'\n") if result == "failed" else error == ""
    table = {"title": "Table", "columns": ["a"], "rows": [[1]], "note": "a note"}
    assert tables == ([table] if result == "ok" else [])


def test_each_finding_is_saved() -> None:
    saved: list[Any] = []
    check = Check("cpu", save=lambda of: saved.append((list(of.details), len(of.failures), len(of.tables))))
    check.say("a")
    rows = check.begin("Table", ["a"])
    rows.append([1])
    for name in ("first", "second"):
        with check.part(name):
            raise ValueError(name)
    assert saved == [(["a"], 0, 0), (["a"], 0, 1), (["a"], 0, 1), (["a"], 1, 1), (["a"], 2, 1)]
    record = check.record("x", "failed", 1.23456)
    assert record["seconds"] == 1.235
    assert [line for line in record["error"].splitlines() if line and line[0] != " "] == [
        "first: Traceback (most recent call last):", "ValueError: first", "second: Traceback (most recent call last):",
        "ValueError: second",
    ]  # fmt: skip


def test_an_emulated_gpu_is_prepared_for_its_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool is found in the checkout's tests, which come first on Python's path."""
    monkeypatch.setattr(emulated, "find_toolkit", lambda: None)
    monkeypatch.setattr(emulated, "source_dir", lambda: tmp_path / "cuda")
    monkeypatch.setenv("CXX", "sh")
    tool = tmp_path / "tests/ptx/fake_torch_cuda.py"
    tool.parent.mkdir(parents=True)
    tool.write_text("")
    assert emulated.tests_directory() == tmp_path / "tests"
    monkeypatch.setattr("sys.path", ["other"])
    fake = SimpleNamespace(fake_torch_cuda=SimpleNamespace(prepare=lambda step: f"gpu for {step}"))
    monkeypatch.setitem(sys.modules, "ptx", fake)
    assert emulated.prepare("smoke") == "gpu for smoke"
    assert sys.path == [str(tmp_path / "tests"), "other"]
