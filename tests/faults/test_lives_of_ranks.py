"""A rank of moe-rt chaos obeys its orders in one sequence and reports how each session ended, and what it leaks."""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_rt import faults
from moe_rt.errors import CapacityOverflow, GroupPoisoned, InvalidRouting, PeerDead
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.lab.chaos import worker
from moe_rt.lab.testing.rounds import WrongOutput

PATIENCE_S = 600.0
ORDER: dict[str, Any] = {
    "host": "here", "port": 4321, "session": "7", "rank": 1, "size": 3, "timeout_s": 2.5, "init_timeout_s": 3.5,
}  # fmt: skip
PLACE = 2


class Life:
    """A rank whose group, buffer and steps are fakes, all of which note what is done with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.fails: dict[int, BaseException] = {}  # by the number of the step, or -1 for making the buffer
        self.after: BaseException | None = None  # what a step raises after a failure
        self.board = worker.Board(3)
        self.board.step[PLACE] = -1
        monkeypatch.setattr(self.board, "begin", lambda place: self.note("begin", place, self.board.step[place]))
        for name in ("await_peers", "TCPStore", "PrefixStore", "limited", "held", "left_of", "misbehave"):
            monkeypatch.setattr(worker, name, getattr(self, name))
        monkeypatch.setattr(worker, "make_buffer", self.make_buffer)
        monkeypatch.setattr(worker, "Steps", self.steps)
        monkeypatch.setattr(worker, "mmap", SimpleNamespace(mmap=self.map))
        monkeypatch.setattr(worker.time, "monotonic", lambda: 55.5)
        monkeypatch.setattr(torch, "set_num_threads", lambda number: self.note("threads", number))
        group = {"init_process_group": self.init_process_group, "destroy_process_group": lambda: self.note("leave")}
        monkeypatch.setattr(worker, "dist", SimpleNamespace(**group, group=SimpleNamespace(WORLD="world")))

    def note(self, *what: Any) -> None:
        self.did.append(what)

    def await_peers(self) -> None:
        self.note("await_peers")

    def TCPStore(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def PrefixStore(self, prefix: str, store: Any) -> Any:
        self.note("store", prefix, store)
        return SimpleNamespace(set=lambda *given: self.note("set", *given), wait=lambda keys: self.note("wait", keys))

    def init_process_group(self, backend: str, *, store: Any, rank: int, world_size: int) -> None:
        self.note("join", backend, rank, world_size)

    @contextmanager
    def limited(self, kind: str, room: int) -> Iterator[None]:
        self.note("limited", kind, room)
        yield
        self.note("unlimited")

    def held(self) -> dict[str, int]:
        self.note("held")
        return {"threads": 3}

    def left_of(self, before: dict[str, int]) -> dict[str, int]:
        self.note("left_of")
        return {"threads": before["threads"] + 1}

    def misbehave(self, buffer: Any, *given: Any) -> None:
        self.note("misbehave", *given)

    def map(self, descriptor: int, size: int, flags: int = mmap.MAP_SHARED) -> Any:
        return Memory(self, descriptor, size, flags)

    def make_buffer(
        self, group: Any, num_ranks: int, size: worker.Size, timeout_s: float, init_timeout_s: float
    ) -> Any:
        interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        fault = os.environ[faults.VARIABLE]
        where = group if isinstance(group, str) else type(group).__name__
        self.note("make", where, num_ranks, size, timeout_s, init_timeout_s, interrupts, fault)
        if -1 in self.fails and group == "world":
            raise self.fails[-1]
        return Made(self)

    def steps(self, buffer: Any, board: Any, place: int, modes: Any = ("train",)) -> Any:
        ours = board is self.board
        assert isinstance(buffer, Made)
        assert ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "what follows is not interrupted"
        self.note("steps", "of the session" if ours else "afterwards", place, modes)

        def run(i: int) -> None:
            self.note("run", i)
            later = any(each[0] == "begin" for each in self.did)
            error = self.fails.get(i) if ours else self.after if later else None
            if error is not None:
                raise error

        return SimpleNamespace(run=run)

    def serve(self, *orders: dict[str, Any], steps: int = 2, remote: bool = False) -> list[dict[str, Any]]:
        """Obey the orders, and return the reports."""
        self.board.steps[PLACE], reports, left = steps, list[dict[str, Any]](), list(orders)

        def receive() -> bytes:
            self.note("orders?", signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
            if not left:
                raise EOFError
            return json.dumps({**ORDER, **left.pop(0)}).encode()

        channel: Any = SimpleNamespace(receive=receive, send=lambda text: reports.append(json.loads(text)))
        worker.serve(channel, self.board, PLACE, remote)
        return reports

    def of_the_session(self) -> list[tuple[Any, ...]]:
        """Return what was done from the buffer's making until the group was left."""
        begin = next(i for i, each in enumerate(self.did) if each[0] == "begin")
        return self.did[begin : self.did.index(("leave",))]


class Memory:
    def __init__(self, life: Life, descriptor: int, size: int, flags: int) -> None:
        self._life = life
        life.note("memory", descriptor, size, flags)

    def close(self) -> None:
        self._life.note("memory closed")


class Made:
    """A buffer that is not one."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *_: object) -> None:
        self._life.note("close")

    def close(self) -> None:
        self._life.note("close")

    def abort(self, error: BaseException | None = None) -> None:
        self._life.note("abort", error)


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setenv(faults.VARIABLE, "of an earlier program")
    before = signal.getsignal(signal.SIGINT)
    made = Life(monkeypatch)
    monkeypatch.setattr(worker, "Board", lambda size: made.note("board", size))
    yield made
    signal.signal(signal.SIGINT, before)


WARM_UP = [
    ("threads", 1), ("make", "ThreadGroup", 1, worker.Size(), 60.0, 60.0, False, ""), ("board", 1),
    ("steps", "afterwards", 0, ("train",)), ("run", 0), ("close",),
]  # fmt: skip
POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
JOIN = [
    ("store", "7", ("here", 4321)), ("join", "gloo", 1, 3), ("set", "connected/1", "1"),
    ("wait", ["connected/0", "connected/1", "connected/2"]),
]  # fmt: skip
MADE = ("make", "world", 3, worker.Size(), 2.5, 3.5, True, "")


def test_a_session_that_goes_well(life: Life) -> None:
    reports = life.serve({})
    assert life.did == [
        *WARM_UP, ("orders?", True), ("held",), ("memory", -1, 1, POPULATED), *JOIN, ("begin", PLACE, -1), MADE,
        ("steps", "of the session", PLACE, ["train"]), ("run", 0), ("run", 1), ("begin", PLACE, 0), ("close",),
        ("await_peers",), ("leave",), ("memory closed",), ("left_of",), ("orders?", True),
    ]  # fmt: skip
    assert reports == [{"raised": "nothing", "steps": 2, "then": "nothing", "made": True, "threads": 4}]
    assert life.board.step[PLACE] == 0


def test_ranks_of_several_hosts_try_their_network_first(life: Life) -> None:
    assert life.serve(remote=True) == []
    assert life.did == [
        *WARM_UP, ("join", "gloo", 0, 1), ("make", "world", 1, worker.Size(heap="ucx"), 60.0, 60.0, False, ""),
        ("close",), ("await_peers",), ("leave",), ("orders?", True),
    ]  # fmt: skip


def test_optional_orders(life: Life) -> None:
    more = {"fault": "rank=0,at=mid_read,do=kill", "sizes": {"depth": 2}, "modes": ["no_grad"], "ballast_mib": 3}
    reports = life.serve({**more, "limit": ["memory", 9], "instead": [1, 1, "close"]}, {}, steps=3)
    size = worker.Size(depth=2)
    assert ("memory", -1, 3 << 20, POPULATED) in life.did
    assert life.of_the_session()[1:-3] == [
        ("limited", "memory", 9), ("make", "world", 3, size, 2.5, 3.5, True, more["fault"]), ("unlimited",),
        ("steps", "of the session", PLACE, ["no_grad"]), ("run", 0), ("misbehave", "close", True, 1), ("run", 1),
        ("run", 2),
    ]  # fmt: skip
    assert MADE in life.did, "the next session has no fault"
    assert [report["steps"] for report in reports] == [3, 3]


@pytest.mark.parametrize(("who", "by_this_rank"), [(0, False), (1, True)])
def test_one_rank_misbehaves(life: Life, who: int, by_this_rank: bool) -> None:
    life.serve({"instead": [who, 0, "raise"]})
    assert life.of_the_session()[3:5] == [("misbehave", "raise", by_this_rank, 0), ("run", 0)]


@pytest.mark.parametrize(
    ("fault", "steps"), [("rank=1,at=in_destroy", 2), ("rank=2,at=in_destroy", 3), ("rank=1,at=mid_read", 3)]
)
def test_a_rank_that_fails_at_its_end_ends_a_step_earlier(life: Life, fault: str, steps: int) -> None:
    """The others then still wait for it."""
    assert life.serve({"fault": fault}, steps=3)[0]["steps"] == steps


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (PeerDead("rank 0 ended", peer=0), {"raised": "PeerDead", "typed": True, "peer": 0}),
        (GroupPoisoned("no peer"), {"raised": "GroupPoisoned", "typed": True, "peer": -1}),
        (WrongOutput("out"), {"raised": "wrong data", "typed": False, "peer": -1, "message": "out"}),
        (ValueError("odd"), {"raised": "ValueError", "typed": False, "peer": -1, "message": "odd"}),
        (KeyboardInterrupt(), {"raised": "KeyboardInterrupt", "typed": False, "peer": -1, "message": ""}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_session_that_fails(life: Life, error: BaseException, report: dict[str, Any]) -> None:
    """A rank tries another step after its error, and leaves its group as a `with` block would."""
    life.fails = {1: error}
    life.after = GroupPoisoned("again")
    (found,) = life.serve({})
    expected = {"steps": 1, "then": "GroupPoisoned", "made": True, "message": str(error), "at": 55.5, "threads": 4}
    assert found == {**expected, **report}
    left = [("abort", error)] if not report["typed"] else []
    tail = life.of_the_session()[4:]
    assert tail == [
        ("run", 1), *left, ("board", 1), ("steps", "afterwards", 0, ("train",)), ("run", 0), ("abort", None),
        ("await_peers",),
    ]  # fmt: skip


@pytest.mark.parametrize(("after", "then"), [(None, "nothing"), (WrongOutput("x"), "WrongOutput")])
def test_a_step_after_a_failure_is_reported(life: Life, after: BaseException | None, then: str) -> None:
    life.fails, life.after = {0: PeerDead("it ended")}, after
    assert life.serve({})[0]["then"] == then


def test_a_buffer_that_cannot_be_made(life: Life) -> None:
    life.fails = {-1: PeerDead("it ended", peer=2)}
    (report,) = life.serve({})
    assert (report["raised"], report["made"], report["steps"], report["then"]) == ("PeerDead", False, 0, "nothing")
    assert life.of_the_session() == [("begin", PLACE, -1), MADE, ("await_peers",)]


def test_inputs_of_steps_by_their_formula() -> None:
    """Tokens, choices and dropped entries depend on the rank and the step, and choices of a token differ."""
    for rank in range(3):
        for most in (1, 8):
            spec = SimpleNamespace(num_max_tokens_per_rank=most, num_experts=6, hidden=5)
            for i in range(13):
                x, topk_idx = worker.inputs(SimpleNamespace(rank=rank, spec=spec), i)  # type: ignore[arg-type]
                num_tokens = (most - 5 * rank - 3 * (i // 3)) % (most + 1)
                rows, choices = [], []
                for t in range(num_tokens):
                    rows.append([float((t + 7 * i + 3 * rank) % 11 + h % 3) for h in range(5)])
                    first = (t + i + rank) % 6
                    second = -1 if t % 4 == 3 else (first + 1 + t) % 6
                    choices.append([first, -1 if second == first else second])
                assert x.requires_grad
                assert x.tolist() == rows
                assert topk_idx.tolist() == choices


class Noting:
    """A buffer of one rank that notes the ops asked of it; its rank and depth may be claimed."""

    def __init__(self, buffer: Any, rank: int, depth: int) -> None:
        self._buffer, self.rank, self.asked = buffer, rank, list[Any]()
        self.spec = SimpleNamespace(**{**vars_of(buffer.spec), "depth": depth})
        self.outputs: list[torch.Tensor] = []

    def dispatch(self, *given: Any, **named: Any) -> Any:
        self.asked.append(("dispatch", named, given[0].requires_grad, given[2].requires_grad))
        return self._buffer.dispatch(*given, **named)

    def combine(self, *given: Any, **named: Any) -> Any:
        self.asked.append(("combine", named))
        done = self._buffer.combine(*given, **named)
        return done if not named else SimpleNamespace(wait=lambda: self._kept(done.wait()))

    def _kept(self, out: torch.Tensor) -> torch.Tensor:
        self.outputs.append(out)
        return out


def vars_of(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("num_max_tokens_per_rank", "num_experts", "hidden")}


@contextmanager
def one_rank(rank: int, depth: int) -> Iterator[tuple[Noting, worker.Steps]]:
    """Yield a buffer of eight experts, as of four ranks, and steps on it."""
    size = worker.Size(depth=depth)
    with worker.make_buffer(ThreadGroup.make(1)[0], 1, size, PATIENCE_S, PATIENCE_S) as buffer:
        noting = Noting(buffer, rank, depth)
        yield noting, worker.Steps(noting, worker.Board(1), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_ops_of_steps(rank: int, depth: int) -> None:
    """Ranks differ in which ops they do in halves, and with a depth another dispatch is under way."""
    with one_rank(rank, depth) as (buffer, steps):
        for i in range(4):
            del buffer.asked[:]
            steps.run(i)
            halves = [{} if (n + rank) % 2 else {"wait": False} for n in (i, i // 2)]
            other = [("dispatch", {"tag": i, "wait": False}, False, False)] if depth > 1 else []
            assert buffer.asked == [*other, ("dispatch", halves[0], True, True), ("combine", halves[1])]


@pytest.mark.parametrize("i", range(5))
def test_every_third_output_is_looked_at_again(i: int) -> None:
    """Its memory must not have been given to another tensor until the next step is done."""
    rank = 1
    with one_rank(rank, 1) as (_, steps):
        for step in range(i + 1):
            steps.run(step)
        kept = (i + rank) % 3 == 0
        assert (steps._kept is not None) == kept
        if kept:
            steps._kept[0].add_(1)  # type: ignore[index]
            with pytest.raises(WrongOutput, match=r"^out of the step before"):
                steps.run(i + 1)
        else:
            steps.run(i + 1)


def buffer_of(rank: int = 0, dispatch: Callable[..., None] | None = None) -> Any:
    did: list[tuple[Any, ...]] = []
    spec = SimpleNamespace(num_max_tokens_per_rank=8, num_experts=6, hidden=5)
    return SimpleNamespace(
        rank=rank,
        spec=spec,
        did=did,
        close=lambda: did.append(("close",)),
        abort=lambda error: did.append(("abort", type(error), str(error))),
        dispatch=dispatch or (lambda *given: did.append(("dispatch", *(each.tolist() for each in given)))),
    )


def test_misbehaviours() -> None:
    for act in ("raise", "close", "abort", "order"):
        worker.misbehave(buffer := buffer_of(), act, False, 1)
        assert buffer.did == [], "one rank does it"
    with pytest.raises(ValueError, match=r"^a mistake on purpose$"):
        worker.misbehave(buffer_of(), "raise", True, 1)
    for act, expected in (("close", ("close",)), ("abort", ("abort", ValueError, "a mistake on purpose"))):
        worker.misbehave(buffer := buffer_of(), act, True, 1)
        assert buffer.did == [expected]
    worker.misbehave(buffer := buffer_of(), "order", True, 1)
    x, topk_idx = worker.inputs(buffer, 1)
    assert buffer.did == [("dispatch", x.tolist(), topk_idx.tolist(), [[1.0, 1.0]] * len(x))] * 2


@pytest.mark.parametrize("by_this_rank", [False, True])
@pytest.mark.parametrize("act", ["input", "overflow"])
def test_what_is_refused(act: str, by_this_rank: bool) -> None:
    """One rank chooses an expert that does not exist; or every rank sends all of its rows to one rank."""
    given: list[Any] = []

    def dispatch(*tensors: torch.Tensor) -> None:
        given.extend(each.tolist() for each in tensors)
        raise InvalidRouting("refused") if act == "input" else CapacityOverflow("refused")

    worker.misbehave(buffer := buffer_of(dispatch=dispatch), act, by_this_rank, 1)
    if act == "overflow":
        assert given == [[[1.0] * 5] * 8, [[0, 1]] * 8, [[1.0, 1.0]] * 8]
    elif by_this_rank:
        assert given == [[[1.0] * 5], [[6, 6]], [[1.0, 1.0]]]
    else:
        x, topk_idx = worker.inputs(buffer, 1)
        assert given == [x.tolist(), topk_idx.tolist(), [[1.0, 1.0]] * len(x)]


class Doubled(torch.autograd.Function):
    """Return the same values, with twice the gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * grad


class Wrong(Noting):
    """A buffer that gives one result wrong."""

    def __init__(self, buffer: Any, wrong: str) -> None:
        super().__init__(buffer, 0, 2)
        self._wrong = wrong

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, **named: Any) -> Any:
        rows = int((topk_idx >= 0).sum())
        given = {
            "grad_x": lambda: (Doubled.apply(x), topk_idx, weights),
            "no grad_x": lambda: (x.detach(), topk_idx, weights),
            "grad_topk_weights": lambda: (x, topk_idx, Doubled.apply(weights)),
        }.get(self._wrong, lambda: (x, topk_idx, weights))
        done = self._buffer.dispatch(*given(), **named)
        if "tag" not in named or not self._wrong.startswith("other"):
            return done
        results = done.wait()
        results[0][rows if self._wrong == "other, after its rows" else rows - 1] += 1
        return SimpleNamespace(wait=lambda: results)

    def combine(self, *given: Any, **named: Any) -> Any:
        done = self._buffer.combine(*given, **named)
        out = done.wait() if named else done
        out = torch.cat([out[:-1], out[-1:] + 1]) if self._wrong == "out" else out
        return SimpleNamespace(wait=lambda: out) if named else out


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("", ""),
        ("other", "recv_x of an op under way"),
        ("other, after its rows", ""),
        ("out", "out"),
        ("grad_x", "grad_x"),
        ("no grad_x", "grad_x"),
        ("grad_topk_weights", "grad_topk_weights"),
    ],
)
def test_each_wrong_result_is_named(wrong: str, name: str) -> None:
    size = worker.Size(depth=2)
    with worker.make_buffer(ThreadGroup.make(1)[0], 1, size, PATIENCE_S, PATIENCE_S) as buffer:
        steps = worker.Steps(Wrong(buffer, wrong), worker.Board(1), 0)  # type: ignore[arg-type]
        for i in range(2):
            with nullcontext() if not name else pytest.raises(WrongOutput, match=f"^{name}$"):
                steps.run(i)


def refused_and_right(group: ThreadGroup) -> int:
    """Run steps, and let all ranks refuse an op before each; return the number of steps that were right."""
    size = worker.Size(capacity_factor=worker.TIGHT)
    with worker.make_buffer(group, group.size, size, PATIENCE_S, PATIENCE_S) as buffer:
        steps = worker.Steps(buffer, worker.Board(group.size), group.rank)
        for i in range(9):
            worker.misbehave(buffer, "overflow", group.rank == 1, i)
            worker.misbehave(buffer, "input", group.rank == 1, i)
            steps.run(i)
    return i + 1


@pytest.mark.parametrize("size", [2, 3])
def test_a_tight_capacity_fits_steps_but_not_all_rows_on_one_rank(size: int) -> None:
    assert ThreadGroup.run(refused_and_right, size, timeout_s=PATIENCE_S) == [9] * size
