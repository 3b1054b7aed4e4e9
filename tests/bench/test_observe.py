"""moe_rt's own measurements, on a clock that its ops advance: phases, waits for each peer, Python's part, shares."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moe_rt.lab.bench import observe, rank
from moe_rt.lab.bench.contestants.base import Step
from moe_rt.lab.bench.inputs import Inputs
from moe_rt.lab.bench.observe import line_latency_ns, observe_layer, observe_pair
from moe_rt.lab.bench.world import World

# Nanoseconds before announcing, waiting and after, of each op; and the time each of three peers was seen, also itself.
SPANS = {
    "dispatch": (1_000, 2_000, 4_000),
    "combine": (8_000, 16_000, 32_000),
    "dispatch_backward": (100, 200, 400),
    "combine_backward": (10, 20, 40),
}
SEEN = {"dispatch": [500, 500, 2_000], "combine": [0, 9_000, 16_000]}
AROUND = {"dispatch": 300, "combine": 500, "dispatch_backward": 70, "combine_backward": 30}  # Python's part


class Machine:
    """A clock, and a buffer whose ops advance it by SPANS and AROUND."""

    def __init__(self) -> None:
        self.now = 0
        self._last = "combine"

    def clock(self) -> int:
        return self.now

    def op(self, name: str) -> None:
        self._last = name
        self.now += sum(SPANS[name]) + AROUND[name]

    def timings(self) -> dict[str, Any]:
        before, wait, after = SPANS[self._last]
        spans = {"before_ns": before, "wait_ns": wait, "after_ns": after}
        return {**spans, "arrival_ns": SEEN.get(self._last, []), "line_latency_ns": [0.0, 40.0, 20.0]}

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_Op.apply(self, "dispatch", x, topk_weights), None

    def combine(self, rows: Tensor, weights: Tensor, handle: None) -> Tensor:
        out, _ = _Op.apply(self, "combine", rows, weights)
        return out


class Looking(Machine):
    """A machine whose estimate of its peers' lines is right after `needed` small dispatches."""

    def __init__(self, needed: int) -> None:
        super().__init__()
        self.needed, self.tokens = needed, 0

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        self.needed, self.tokens = self.needed - 1, len(x)
        return x, topk_weights, None

    def timings(self) -> dict[str, Any]:
        return {"line_latency_ns": [0.0, 400.0 if self.needed > 0 else 12.0, 12.0]}


def test_lines_are_read_after_small_ops() -> None:
    """An estimate that rises by half a look needs seven of each of two peers from 10 to 120 ns."""
    buffer: Any = Looking(needed=2 * 7)
    world: Any = SimpleNamespace(size=3, gather=lambda text: [text] * 3)
    inputs = Inputs(torch.zeros(1000, 8), torch.zeros(1000, 2, dtype=torch.int64), torch.ones(1000, 2))
    assert line_latency_ns(world, buffer, inputs) == [[0.0, 12.0, 12.0]] * 3
    assert buffer.tokens <= 64


class _Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, machine: Machine, name: str, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.op = lambda: machine.op(f"{name}_backward")
        machine.op(name)
        return rows.clone(), weights.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor]:
        ctx.op()
        return None, None, *grads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr("moe_rt.lab.bench.observe.perf_counter_ns", machine.clock)
    return machine


def world_of(*others: Callable[[Any], Any], meet: Callable[[], object] = int) -> World:
    """Return rank 0's world; each function computes another rank's notes from rank 0's. `meet` runs in each meeting."""
    board: Any = SimpleNamespace(
        all_gather=lambda text, timeout_s: [text, *(json.dumps(other(json.loads(text))) for other in others)]
    )
    processor: Any = SimpleNamespace(finish=int, cool=int)
    group: Any = None
    return World(0, 1 + len(others), group, board, SimpleNamespace(wait=meet), processor, mpi=False)  # type: ignore[arg-type]


def times(factor: int) -> Callable[[Any], Any]:
    """A rank on which everything takes `factor` times as long."""

    def multiplied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: multiplied(item) for key, item in value.items()}
        return [multiplied(item) for item in value] if isinstance(value, list) else value * factor

    return multiplied


def test_a_pair(machine: Machine) -> None:
    """Rank 1 takes three times as long as rank 0, so means over ranks are twice rank 0's. All but lines are in us."""
    inputs = Inputs(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    buffer: Any = machine
    seen = observe_pair(world_of(times(3)), buffer, [inputs], cold=False)
    assert seen["breakdown"] == pytest.approx(
        {"publish": 2, "wait for rows": 4, "gather": 8, "push": 16, "wait for partials": 32, "reduce": 64}
    )
    # Time that each peer adds to the time of the peers before it: 500, 0 and 1500 ns; 0, 9000 and 7000 ns.
    assert seen["waits"] == {
        "dispatch": [pytest.approx([0.5, 0, 1.5]), pytest.approx([1.5, 0, 4.5])],
        "combine": [pytest.approx([0, 9, 7]), pytest.approx([0, 27, 21])],
    }
    assert seen["line_latency_ns"] == [[0, 40, 20], [0, 120, 60]]
    # One walk runs two backwards: each gets half of the time outside the engine, (70 + 30) / 2.
    assert seen["overhead"] == pytest.approx(
        {
            "dispatch no_grad": 0.6,
            "combine no_grad": 1.0,
            "dispatch grad": 0.6,
            "combine grad": 1.0,
            "each backward grad": 0.1,
        }
    )


def test_a_pair_is_told_by_its_median(machine: Machine) -> None:
    """Phases are medians, which one iteration of ten times the length does not change; a wait is a mean, which it
    does."""
    inputs = Inputs(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    calls = 0
    timings = machine.timings

    def slow_once() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        found = timings()
        return times(10)(found) if calls <= 2 else found  # the first op queries twice: spans and arrivals

    buffer: Any = SimpleNamespace(dispatch=machine.dispatch, combine=machine.combine, timings=slow_once)
    seen = observe_pair(world_of(), buffer, [inputs], cold=False)
    assert list(seen["breakdown"].values()) == [1, 2, 4, 8, 16, 32]
    often = (14 * 1 + 1 * 10) / 15
    assert seen["waits"]["dispatch"][0] == pytest.approx([0.5 * often, 0, 1.5 * often])


class Named:
    """An op as torch's dispatcher passes it to a mode; an op that is not one of the four takes 1 us."""

    def __init__(self, machine: Machine, name: str, namespace: str = "moe_rt") -> None:
        self.namespace, self._opname, self._machine = namespace, name, machine

    def __call__(self) -> None:
        if self.namespace == "moe_rt" and self._opname in SPANS:
            self._machine.op(self._opname)
        else:
            self._machine.now += 1_000


def test_the_share_of_a_layer(machine: Machine) -> None:
    """Dispatch takes 7.3 of 100 us and waits 2, combine takes 56.5 and waits 16; their backwards take 0.77 and 0.1 and
    wait 0.2 and 0.02. Nothing else counts.

    Rank 1 has half the share, so the mean is three quarters of rank 0's.
    """

    def run(i: int) -> None:
        mode: Any = _get_current_dispatch_mode()
        end = machine.now + 100_000
        for op in ("agree", "aten::dispatch", *SPANS):
            namespace, _, name = op.rpartition("::")
            mode.__torch_dispatch__(Named(machine, name, namespace or "moe_rt"), ())
        machine.now = end

    world = world_of(lambda shares: [share / 2 for share in shares])
    buffer: Any = machine
    seen = observe_layer(world, buffer, [Step(run, lambda i, output: None, "forward")], cold=False)
    assert seen == {"share": {"forward": pytest.approx({"in_ops": 64.67 * 0.75, "of_it_waiting": 18.22 * 0.75})}}


def test_ranks_meet_before_each_measurement(machine: Machine) -> None:
    """Otherwise a rank that is late from one iteration would be waited for in the next."""
    events: list[str] = []
    world = world_of(meet=lambda: events.append("meet"))
    inputs = Inputs(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))

    def noted(name: str) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            events.append(name)
            return getattr(machine, name)(*given)

        return run

    buffer: Any = SimpleNamespace(dispatch=noted("dispatch"), combine=noted("combine"), timings=machine.timings)
    observe_pair(world, buffer, [inputs], cold=False)
    assert events == ["meet", "dispatch", "combine"] * 2 * observe.ITERS

    events.clear()

    def run(i: int) -> None:
        events.append("layer")
        machine.now += 1_000

    observe_layer(world, buffer, [Step(run, lambda i, output: None, "forward")], cold=False)
    assert events == ["meet", "layer"] * (observe.ITERS // 3)


@pytest.mark.parametrize(
    ("op", "on_gpu", "expected"), [("pair", False, ["pair", "inputs"]), ("layer", False, ["layer", "steps"]),
                                   ("pair", True, []), ("layer", True, [])],
)  # fmt: skip
def test_what_is_observed(monkeypatch: pytest.MonkeyPatch, op: str, on_gpu: bool, expected: list[str]) -> None:
    """The host does not observe a GPU's ops."""
    for name in ("pair", "layer"):
        observed = lambda world, buffer, given, cold, name=name: {"called": [name, given]}  # noqa: E731
        monkeypatch.setattr(rank, f"observe_{name}", observed)
    contestant: Any = SimpleNamespace(case=SimpleNamespace(op=op, on_gpu=on_gpu), buffer=None)
    given: Any = (None, SimpleNamespace(cold=False), contestant, "steps", "inputs")
    assert rank._observe(*given).get("called", []) == expected
