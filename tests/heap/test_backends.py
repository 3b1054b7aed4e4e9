"""The backend of a group: its heap, GPU, hosts and route, over all kinds of groups; how an engine is made or left."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from support.ranks import ThreadRanks
from support.routing import make_spec

from moe_rt import ThreadGroup, _engine
from moe_rt.config.options import BufferOptions, HeapKind
from moe_rt.config.topology import Topology
from moe_rt.engine import backend
from moe_rt.engine.backend import Backend, choose_backend, choose_route, find_hosts
from moe_rt.engine.gpu.launcher import network_bytes
from moe_rt.errors import GroupClosed, GroupPoisoned, InvalidConfig, InvalidInput, PeerDead, PeerTimeout
from moe_rt.memory.segments import Segments

HEAPS = ("auto", *get_args(HeapKind))
STAND_IN = SimpleNamespace(device=torch.device("cpu"))


def refused(heap: str, *names: str) -> str:
    some = ", ".join(f'"{name}"' for name in names[:-1])
    return f'heap: got "{heap}", expected "auto", {some} or "{names[-1]}" for this kind of group'


def expected_of_threads(device: Any, heap: str) -> Any:
    on_gpu = device is STAND_IN or torch.device(device).type == "cuda"
    gpu = device if device is STAND_IN else f"the GPU of {device if on_gpu else 'cuda'}"
    if heap == "auto":
        heap = "loopback" if on_gpu else "threads"
    found = {"threads": ("threads", None, False), "loopback": ("loopback", gpu, False)}
    return found.get(heap, refused(heap, "threads", "loopback"))


def found(group: Any, heap: Any) -> Any:
    try:
        chosen = choose_backend(group, heap)
    except InvalidConfig as error:
        return error.args[0]
    assert chosen.hosts is None
    return chosen.heap, chosen.gpu, chosen.anywhere


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cpu"), torch.device("cuda", 2), STAND_IN], ids=str)
def test_backends_of_threads(monkeypatch: pytest.MonkeyPatch, device: Any, heap: str) -> None:
    monkeypatch.setattr(backend, "Gpu", lambda device: f"the GPU of {device}")
    assert found(ThreadGroup.make(1, device)[0], heap) == expected_of_threads(device, heap)


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize(("gpus", "nccl"), list(itertools.product([True, False], repeat=2)))
def test_backends_of_processes(monkeypatch: pytest.MonkeyPatch, gpus: bool, nccl: bool, heap: str) -> None:
    monkeypatch.setattr(backend.torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(backend, "_has_nccl", lambda rendezvous: nccl)
    monkeypatch.setattr(backend, "Gpu", lambda device: f"the GPU of {device}")
    expected = {
        "auto": ("nvshmem", "the GPU of cuda", False) if gpus and nccl else ("shm", None, True),
        **{name: (name, None, False) for name in ("shm", "ucx")},
        **{name: (name, "the GPU of cuda", False) for name in ("nvshmem", "gin")},
    }
    assert found(None, heap) == expected.get(heap, refused(heap, "shm", "ucx", "nvshmem", "gin"))


@pytest.mark.parametrize(("name", "expected"), [("nccl", True), ("gloo", False), (None, False)])
def test_groups_that_ask_for_nccl(name: str | None, expected: bool) -> None:
    def get_backend(device: torch.device) -> Any:
        assert device == torch.device("cuda")
        if name is None:
            raise RuntimeError("no backend for CUDA")
        return SimpleNamespace(name=lambda: name)

    rendezvous: Any = SimpleNamespace(group=SimpleNamespace(_get_backend=get_backend))
    assert backend._has_nccl(rendezvous) is expected


class Heard:
    """Rank 0; the records of the others are its own with some changes."""

    rank = 0

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others, self.size = others, 1 + len(others)

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def all_gather(self, payload: str, timeout_s: float) -> list[str]:
        return [payload, *(json.dumps({**json.loads(payload), **other}) for other in self.others)]


ELSE = {"where": "another host"}
UNKNOWN = [{"where": f"{backend.UNKNOWN} {number}"} for number in range(2)]


@pytest.mark.parametrize(
    ("asked", "others", "heap", "hosts"),
    [
        ("auto", [{}], "shm", (0, 0)),
        ("auto", [ELSE], "ucx", (0, 1)),
        ("auto", [ELSE, ELSE, {}], "ucx", (0, 1, 1, 0)),
        ("auto", UNKNOWN, "shm", (0, 1, 2)),
        ("auto", [*UNKNOWN, ELSE], "ucx", (0, 1, 2, 3)),
        ("auto", [{"heap": "ucx"}], "ucx", (0, 0)),
        ("auto", [{"heap": "shm", **ELSE}], "shm", (0, 1)),
        ("ucx", [{"heap": "auto"}, {}], "ucx", (0, 0, 0)),
        ("shm", [{"heap": "auto", **ELSE}], "shm", (0, 1)),
    ],
    ids=str,
)
def test_hosts_and_the_heap_that_reaches_them(asked: str, others: Any, heap: str, hosts: tuple[int, ...]) -> None:
    given = Backend("shm" if asked == "auto" else asked, None, anywhere=asked == "auto")  # type: ignore[arg-type]
    group: Any = Heard(*others)
    assert find_hosts(given, group, make_spec(group.size), 1.0) == Backend(heap, None, False, Topology(hosts))  # type: ignore[arg-type]


def test_ranks_that_ask_for_different_heaps_are_refused() -> None:
    group: Any = Heard({"heap": "ucx"}, {"heap": "auto"})
    with pytest.raises(InvalidConfig) as raised:
        find_hosts(Backend("shm", None), group, make_spec(3), 1.0)
    assert raised.value.args[0] == "heap: got ['shm', 'ucx'] on different ranks, expected one"
    assert raised.value.rank == 0


@pytest.mark.parametrize("heap", ["threads", "loopback", "nvshmem", "gin"])
def test_other_heaps_have_no_hosts_unless_two_levels_are_possible(heap: Any) -> None:
    gpu: Any = None if heap == "threads" else STAND_IN
    nobody: Any = None  # is asked
    given = Backend(heap, gpu)
    assert find_hosts(given, nobody, make_spec(2, route="flat"), 1.0) is given


ALL, PAIRS, EACH, CROSSED = (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1)


def route(heap: Any, asked: str, told: tuple[int, ...], hosts: tuple[int, ...] | None) -> Any:
    spec = replace(make_spec(4, route=asked), topology=Topology(told))
    made = choose_route(spec, Backend(heap, None, hosts=None if hosts is None else Topology(hosts)))
    return made.route, made.topology.nodes


@pytest.mark.parametrize("heap", ["shm", "threads", "loopback"])
@pytest.mark.parametrize("told", [ALL, PAIRS, EACH])
@pytest.mark.parametrize("asked", ["auto", "flat", "two_level"])
def test_two_levels_of_mapped_memory_are_for_who_asks(heap: str, told: tuple[int, ...], asked: str) -> None:
    two_levels = asked == "two_level" and told != ALL
    for hosts in (None, ALL, PAIRS):
        assert route(heap, asked, told, hosts) == ("two_level" if two_levels else "flat", told)


@pytest.mark.parametrize(
    ("asked", "told", "hosts", "expected"),
    [
        ("auto", ALL, PAIRS, ("two_level", PAIRS)),
        ("auto", PAIRS, PAIRS, ("two_level", PAIRS)),
        ("auto", ALL, EACH, ("flat", EACH)),  # two levels of one rank each move the same bytes
        ("auto", EACH, EACH, ("flat", EACH)),
        ("auto", ALL, ALL, ("flat", ALL)),
        ("auto", PAIRS, ALL, ("flat", PAIRS)),
        ("auto", CROSSED, PAIRS, ("flat", CROSSED)),
        ("flat", PAIRS, PAIRS, ("flat", PAIRS)),
        ("flat", ALL, PAIRS, ("flat", ALL)),
        ("two_level", ALL, PAIRS, ("two_level", PAIRS)),
        ("two_level", EACH, EACH, ("two_level", EACH)),
        ("two_level", ALL, ALL, ("flat", ALL)),
    ],
)
def test_routes_between_hosts(asked: str, told: Any, hosts: Any, expected: Any) -> None:
    assert route("ucx", asked, told, hosts) == expected


@pytest.mark.parametrize(("told", "hosts"), [(CROSSED, PAIRS), (PAIRS, ALL), (EACH, PAIRS)])
def test_nodes_of_cpu_ranks_must_be_their_hosts(told: Any, hosts: Any) -> None:
    with pytest.raises(InvalidConfig) as raised:
        route("ucx", "two_level", told, hosts)
    got = f'route: got "two_level" with nodes {Topology(told)}, expected nodes that are hosts, {Topology(hosts)}'
    assert raised.value.args[0] == got


class Heap:
    """A heap whose segments are noted: sizes as they are allocated, and names as they are released."""

    def __init__(self, network: bool = False, **more: Any) -> None:
        self.noted: list[Any] = []
        self.network, self.more, self.module = network, more, self

    def allocate(self, rendezvous: Any, size: Any, timeout_s: float, *gpu: Any) -> Segments:
        self.noted.append((size, timeout_s, *gpu))
        name = f"released {len(self.noted)}"
        made = Segments([160, 320][: rendezvous.size], [], [], on_release=lambda: self.noted.append(name), **self.more)
        self.made = [*getattr(self, "made", []), made]
        return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Heap, list[Any]]]:
    """Return make(kind, heap, spec, options, ...), which returns what an engine is made with; `fails` refuses it."""

    def making(kind: str, heap: Heap, spec: Any, fails: bool = False, gpu: Any = None, **options: Any) -> Any:
        given: list[Any] = []

        class Made(SimpleNamespace):
            def __init__(self, *positional: Any, **named: Any) -> None:
                given.append((*positional, named))
                if fails:
                    raise InvalidInput("refused")
                super().__init__(reach=lambda point: given.append(point.name), close=lambda: given.append("closed"))

        monkeypatch.setattr(backend, "HEAPS", {"heap": heap})
        monkeypatch.setattr(backend, "CpuEngine", Made)
        monkeypatch.setattr(backend, "CudaEngine", Made)
        group, chosen = ThreadGroup.make(1)[0], Backend("heap", gpu)  # type: ignore[arg-type]
        how = BufferOptions(init_timeout_s=50.0, **options)
        if kind == "cpu":
            engine: Any = backend._make_cpu_engine(chosen, group, spec, how, "the fault")  # type: ignore[arg-type]
        else:
            engine = backend._make_cuda_engine(chosen, gpu, group, spec, how)
        assert isinstance(engine, Made)
        return given

    return making


GPU: Any = SimpleNamespace(num_sms=24, name="a GPU")


@pytest.mark.parametrize(("timeout_s", "expected"), [(2.5, 2.5), (1e9, 1e9), (2e9, 1e9), (math.inf, 1e9)])
@pytest.mark.parametrize("isa", [None, "scalar"])
def test_options_reach_a_cpu_engine(
    make: Any, monkeypatch: pytest.MonkeyPatch, timeout_s: float, expected: float, isa: str | None
) -> None:
    monkeypatch.delenv("MOE_RT_ISA", raising=False)
    if isa:
        monkeypatch.setenv("MOE_RT_ISA", isa)
    spec, heap = make_spec(1), Heap()
    (of_spec, rank, segments, named), reached = make("cpu", heap, spec, timeout_s=timeout_s, num_threads=3)
    assert (of_spec, rank, reached) == (spec, 0, "POST_RENDEZVOUS")
    assert segments is heap.made[0]
    assert named == {"timeout_s": expected, "num_threads": 3, "isa": isa or "auto", "fault": "the fault"}
    assert heap.noted == [(spec.shape().segment_bytes(), 50.0)], "its memory is kept"


def test_cpu_heaps_with_a_network_allocate_by_the_shape(make: Any) -> None:
    heap = Heap(network=True)
    make("cpu", heap, make_spec(1))
    assert isinstance(heap.noted[0][0], _engine.Shape)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_memory_is_released_if_no_engine_can_be_made(make: Any, kind: str) -> None:
    heap = Heap(streams={} if kind == "cuda" else None)
    heap.made = []
    with pytest.raises(InvalidInput, match="refused"):
        make(kind, heap, make_spec(1), fails=True, gpu=GPU)
    assert heap.noted[1:] == ["released 1"]


@pytest.mark.parametrize(("timeout_s", "expected"), [(2.5, 2.5), (math.inf, 1e9)])
@pytest.mark.parametrize(("num_sms", "blocks"), [(None, 24), (5, 5)])
def test_options_reach_a_cuda_engine(make: Any, timeout_s: float, expected: float, num_sms: Any, blocks: int) -> None:
    spec, heap = make_spec(1), Heap()
    ((of_spec, rank, segments, gpu, named),) = make("cuda", heap, spec, gpu=GPU, timeout_s=timeout_s, num_sms=num_sms)
    assert (of_spec, rank, gpu) == (spec, 0, GPU)
    assert segments is heap.made[0]
    assert named == {"network": None, "timeout_s": expected, "max_blocks": blocks, "num_sms": num_sms}
    assert heap.noted == [(spec.gpu_shape().segment_bytes(), 50.0, GPU)]
    assert segments.marks == _engine.closed_marks(spec.gpu_shape(), 0)


@pytest.mark.parametrize(("num_sms", "depth", "part", "blocks"), [(24, 1, 8, 24), (24, 3, 8, 7), (24, 3, 4, 6)])
def test_waits_of_virtual_ranks_share_a_gpu(make: Any, num_sms: int, depth: int, part: int, blocks: int) -> None:
    spec, gpu = make_spec(1, depth=depth), SimpleNamespace(num_sms=num_sms)
    spec = replace(spec, tuning=replace(spec.tuning, sending_part=part))
    assert make("cuda", Heap(streams={}), spec, gpu=gpu)[0][-1]["max_blocks"] == blocks
    assert make("cuda", Heap(), spec, gpu=gpu)[0][-1]["max_blocks"] == num_sms


def test_a_network_has_memory_for_the_rank_with_the_most_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symmetric memory has one size on every rank."""
    heaps, made, spec = [Heap(), Heap()], dict[int, Any](), make_spec(2)

    def allocate(rendezvous: Any, size: Any, timeout_s: float, *gpu: Any) -> Segments:
        segments = heaps[rendezvous.rank].allocate(rendezvous, size, timeout_s, *gpu)
        if rendezvous.rank == 0 and len(heaps[0].noted) == 1:
            segments.addresses[1] = 0  # one rank does not map the other
        return segments

    monkeypatch.setattr(backend, "HEAPS", {"heap": SimpleNamespace(module=SimpleNamespace(allocate=allocate))})
    monkeypatch.setattr(
        backend, "CudaEngine",
        lambda spec, rank, *others, **named: made.setdefault(rank, named) and SimpleNamespace(close=None),
    )  # fmt: skip

    def case(group: ThreadGroup, depth: int) -> None:
        gpu: Any = SimpleNamespace(num_sms=[24, 30][group.rank])
        own, options = replace(spec, depth=depth), BufferOptions(init_timeout_s=50.0)
        backend._make_cuda_engine(Backend("heap", gpu), gpu, group, own, options)  # type: ignore[arg-type]

    ThreadRanks(2).run(case, 1)
    for rank, heap in enumerate(heaps):
        assert [size for size, *_ in heap.noted] == [spec.gpu_shape().segment_bytes(), network_bytes(spec, 30)]
        assert made[rank]["network"] is heap.made[1]
        assert made[rank]["max_blocks"] == [24, 30][rank]
    heaps[:] = [Heap(), Heap()]
    errors = ThreadRanks(2).outcomes(case, 2)
    text = "depth: got 2, expected 1 for GPUs in two levels, or that do not all map each other"
    assert [str(error.args[0]) for error in errors] == [text] * 2
    assert [heap.noted[1:] for heap in heaps] == [["released 1"]] * 2


def test_gpus_retry_no_overflow(make: Any) -> None:
    spec = replace(make_spec(1, capacity_factor=2.0), overflow="retry")
    with pytest.raises(InvalidConfig) as raised:
        make("cuda", Heap(), spec, gpu=GPU)
    got = 'overflow: got "retry" on CUDA, where the host sees no overflow; expected "raise" or "drop"'
    assert raised.value.args[0] == got


def test_an_engine_is_closed_if_a_peer_has_none() -> None:
    closed: list[int] = []

    def case(group: ThreadGroup) -> Any:
        def make_one() -> Any:
            if group.rank == 1:
                raise InvalidInput("none here")
            return SimpleNamespace(close=lambda: closed.append(group.rank))

        return backend._make_all_or_none(group, make_one, 60.0)

    errors = ThreadRanks(3).outcomes(case)
    assert type(errors[1]) is InvalidInput
    assert all(isinstance(error, GroupPoisoned) for error in (errors[0], errors[2]))
    assert sorted(closed) == [0, 2]


class Leaving:
    """An engine, and this process's peers on other hosts, as `leave` uses them."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def poison(self, error: BaseException) -> None:
        self.noted.append(("poison", error))

    def close(self, why: str) -> None:
        self.noted.append(why)


@pytest.mark.parametrize("at_prompt", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("ended it")])
@pytest.mark.parametrize("where", ["exit", "main thread", "another thread"])
def test_why_a_buffer_is_left(monkeypatch: pytest.MonkeyPatch, where: str, error: Any, at_prompt: bool) -> None:
    main = SimpleNamespace(is_alive=lambda: where != "exit")
    monkeypatch.setattr(backend.threading, "main_thread", lambda: main)
    here = SimpleNamespace(is_alive=lambda: False) if where == "another thread" else main
    monkeypatch.setattr(backend.threading, "current_thread", lambda: here)
    monkeypatch.delattr(sys, "last_value", raising=False)
    if error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    if at_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    engine: Any = Leaving()
    monkeypatch.setattr(backend, "await_peers", lambda: engine.noted.append("peers"))
    backend.leave(engine)
    if where != "exit":
        assert engine.noted == ["its buffer became garbage"]
    elif error and not at_prompt:
        assert engine.noted == [("poison", error), "its program ended", "peers"]
    else:
        assert engine.noted == ["its program ended", "peers"]


@pytest.mark.parametrize(
    ("error", "may_follow"),
    [
        (RuntimeError("Connection closed by peer"), True),
        (dist.DistBackendError("remote process exited"), True),
        (dist.DistNetworkError("timed out"), True),
        (RecursionError("a subclass of RuntimeError"), False),
        (ValueError("the program's own"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("health", "is_first"),
    [(GroupPoisoned("peer"), True), (PeerDead("peer"), True), (PeerTimeout("late"), False), (GroupClosed("own"), False),
     (None, False)],
    ids=repr,
)  # fmt: skip
def test_the_first_failure_may_be_a_peers(error: Any, may_follow: bool, health: Any, is_first: bool) -> None:
    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        if health is not None:
            raise health

    engine: Any = SimpleNamespace(health=ask)
    assert backend.first_failure(engine, error) is (health if may_follow and is_first else None)
    assert len(asked) == may_follow


@pytest.mark.parametrize("gpu", [None, GPU])
def test_ranks_agree_before_memory_is_shared(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    noted: list[Any] = []
    group = ThreadGroup.make(1)[0]
    chosen, hosts = Backend("auto", gpu), Backend("threads", gpu)  # type: ignore[arg-type]

    def note(name: str, returns: Any = None) -> Callable[..., Any]:
        return lambda *given: noted.append((name, *given)) or returns

    class Options(BufferOptions):
        def check_own(self) -> None:
            noted.append(("check",))

    options, sizes = Options(init_timeout_s=50.0), {"hidden": 20}
    spec = make_spec(1)
    routed = replace(spec, route="flat")
    monkeypatch.setattr(backend, "choose_backend", note("choose", chosen))
    monkeypatch.setattr(backend, "planned", note("planned", "the fault"))
    monkeypatch.setattr(backend, "reach", note("reach"))
    monkeypatch.setattr(
        backend.BufferSpec, "make", lambda *given, **named: noted.append(("spec", *given, named)) or spec
    )
    monkeypatch.setattr(backend, "agree", note("agree"))
    monkeypatch.setattr(backend, "find_hosts", note("hosts", hosts))
    monkeypatch.setattr(backend, "choose_route", note("route", routed))
    monkeypatch.setattr(backend, "_make_cpu_engine", note("cpu", "its engine"))
    monkeypatch.setattr(backend, "_make_cuda_engine", note("cuda", "its engine"))
    assert backend.open_engine(group, options, sizes) == (routed, "threads", "its engine")
    last = (
        ("cpu", hosts, group, routed, options, "the fault")
        if gpu is None
        else ("cuda", hosts, gpu, group, routed, options)
    )
    assert noted == [
        ("choose", group, "auto"),
        ("planned", 0, 1, gpu is None),
        ("reach", "the fault", backend.Point.PRE_RENDEZVOUS),
        ("check",),
        ("spec", group.topology, options, sizes),
        ("agree", group, spec.record(), 50.0, "make its configuration"),
        ("hosts", chosen, group, spec, 50.0),
        ("route", spec, hosts),
        last,
    ]
