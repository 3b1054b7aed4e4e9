"""Groups that a caller may pass, processes that are closed to this one, and ranks on streams of a fake GPU."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_rt.errors import InvalidConfig
from moe_rt.group import groups, processes, thread_ranks
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks


class Mesh:
    """A mesh that is not one of torch's; rank 3 of a group of six looks at it."""

    def __init__(self, rows: Any, member: bool = True) -> None:
        self.mesh, self._member = torch.tensor(rows), member
        self.ndim = self.mesh.ndim

    def get_coordinate(self) -> list[int] | None:
        return [0] if self._member else None

    def get_group(self) -> str:
        return "its group"


class Groups:
    """Groups of torch that are made up; calls are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.alive: dict[str, Any] = {}
        self.default = True
        monkeypatch.setattr(groups, "DeviceMesh", Mesh)
        monkeypatch.setattr(groups, "_names", {})
        monkeypatch.setattr(groups, "rest_at_exit", lambda: self.made.append("rest"))
        monkeypatch.setattr(groups, "StoreRendezvous", lambda *given: given)
        monkeypatch.setattr(groups, "_get_default_group", lambda: "the default group")
        monkeypatch.setattr(groups, "_resolve_process_group", self.resolve)
        ours = dict(
            is_initialized=lambda: self.default,
            get_world_size=lambda: 6,
            new_group=self.new_group,
            get_process_group_ranks=lambda group: group.ranks,
            group=SimpleNamespace(WORLD="world"),
            ProcessGroup=str,
            GroupMember=dist.GroupMember,
        )
        monkeypatch.setattr(groups, "dist", SimpleNamespace(**ours))

    def new_group(self, ranks: list[int], **options: Any) -> Any:
        made = SimpleNamespace(ranks=ranks, group_name=f"group {len(self.alive)}")
        self.made.append((ranks, options))
        self.alive[made.group_name] = made
        return made

    def resolve(self, name: str) -> Any:
        if name not in self.alive:
            raise RuntimeError
        return self.alive[name]


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Groups:
    for rank, size in groups._LAUNCHERS.values():
        monkeypatch.delenv(rank, raising=False)
        monkeypatch.delenv(size, raising=False)
    return Groups(monkeypatch)


def test_a_group_of_threads_needs_nothing_of_torch(torchs: Groups) -> None:
    group = ThreadGroup.make(2)[1]
    assert groups.rendezvous_of(group) is group
    assert torchs.made == []


def test_torchs_groups(torchs: Groups) -> None:
    """Python waits for gloo at its end once one of them is used."""
    assert groups.rendezvous_of("a group") == ("a group",)  # type: ignore[arg-type]
    assert groups.rendezvous_of(None) == ("world",)
    assert groups.rendezvous_of(Mesh([3, 4])) == ("its group",)  # type: ignore[arg-type]
    assert torchs.made == ["rest"] * 3


def test_no_group_is_a_single_rank(torchs: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs.default = False
    group = groups.rendezvous_of(None)
    assert (type(group), group.rank, group.size) == (ThreadGroup, 0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidConfig) as raised:
        groups.rendezvous_of(None)
    assert str(raised.value).split(" (moe-rt")[0] == (
        "group: got None and no process group with WORLD_SIZE = 4 and RANK = 3, as torchrun sets them, expected "
        "torch.distributed.init_process_group() first, or ThreadGroup.make(1)[0] for a single rank"
    )


@pytest.mark.parametrize("launcher", groups._LAUNCHERS)
@pytest.mark.usefixtures("torchs")
def test_who_started_several_processes(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """Both variables must be set, and the number of ranks must be one of several."""
    rank, size = groups._LAUNCHERS[launcher]
    assert groups.one_of_several() == ""
    monkeypatch.setenv(size, "2")
    assert groups.one_of_several() == ""
    monkeypatch.setenv(rank, "0")
    assert groups.one_of_several() == f"{size} = 2 and {rank} = 0, as {launcher} sets them"
    for number in ("1", "0", "", "two", "-2"):
        monkeypatch.setenv(size, number)
        assert groups.one_of_several() == ""


DIMENSIONS = "one, as in mesh['ep'], or two: nodes, and the ranks of a node"


@pytest.mark.usefixtures("torchs")
def test_what_is_no_group() -> None:
    for group, got in (
        (7, "int, expected a ProcessGroup, DeviceMesh or ThreadGroup"),
        (dist.GroupMember.NON_GROUP_MEMBER, "one that this rank is not a member of, expected a member"),
        (
            Mesh([[[0]]]),
            f"a mesh of 3 dimensions, expected {DIMENSIONS}",
        ),
        (Mesh(0), f"a mesh of 0 dimensions, expected {DIMENSIONS}"),
        (Mesh([0, 1], member=False), "a mesh that this rank is not a part of, expected a member"),
        (Mesh([[0, 1]], member=False), "a mesh that this rank is not a part of, expected a member"),
    ):
        with pytest.raises(InvalidConfig) as raised:
            groups.rendezvous_of(group)  # type: ignore[arg-type]
        assert str(raised.value).split(" (moe-rt")[0] == f"group: got {got}"


def test_a_mesh_of_nodes(torchs: Groups) -> None:
    """Meshes of the same ranks share one group, in ascending order; one that was destroyed is made again."""
    rows, turned = Mesh([[4, 1], [3, 0]]), Mesh([[0, 1], [3, 4]])
    group, topology = groups.rendezvous_of(rows)  # type: ignore[misc, arg-type]
    assert (group.ranks, topology.nodes) == ([0, 1, 3, 4], (1, 0, 1, 0))
    assert groups.rendezvous_of(turned)[0] is group  # type: ignore[index, arg-type]
    assert groups.rendezvous_of(turned)[1].nodes == (0, 0, 1, 1)  # type: ignore[index, arg-type]
    made = ([0, 1, 3, 4], {"use_local_synchronization": True})
    assert [each for each in torchs.made if each != "rest"] == [made]
    torchs.alive.clear()
    assert groups.process_group_of(rows) is not group  # type: ignore[arg-type]
    assert [each for each in torchs.made if each != "rest"] == [made] * 2
    assert groups.process_group_of(Mesh([[0, 1, 2], [3, 4, 5]])) == "the default group"  # type: ignore[arg-type]


class Threads:
    """Threads of this process as /proc shows them in successive looks. The clock advances by a second at each sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: dict[str, Any]) -> None:
        self.looks, self.sleeps, self._at = list(looks), 0, -1
        monkeypatch.setattr(groups, "Path", lambda path: SimpleNamespace(iterdir=self.iterdir))
        monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: float(self.sleeps), sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1

    def iterdir(self) -> Any:
        self._at = min(self._at + 1, len(self.looks) - 1)
        return [Thread(name, of) for name, of in self.looks[self._at].items()]


class Thread:
    def __init__(self, name: str, of: Any) -> None:
        self.name, self._of = name, of

    def __truediv__(self, name: str) -> Any:
        assert name == "status"
        return self

    def read_text(self) -> str:
        if self._of is None:
            raise FileNotFoundError
        name, state, voluntary, involuntary = self._of
        return (
            f"Name:\t{name}\nState:\t{state} (a: \tstate)\nno field\nvoluntary_ctxt_switches:\t{voluntary}\n"
            f"nonvoluntary_ctxt_switches:\t{involuntary}\n"
        )


GLOO = "pt_gloo_runloop"
IDLE = {"1": ("python", "R", 9, 9), "2": None, "3": (GLOO, "S", 5, 6), "4": (GLOO, "S", 7, 8)}


@pytest.mark.parametrize(
    ("looks", "sleeps"),
    [
        ([{"1": ("python", "S", 1, 1)}], 0),
        ([IDLE], 1),
        ([{**IDLE, "3": (GLOO, "R", 5, 6)}, IDLE], 2),
        ([{**IDLE, "4": (GLOO, "S", 6, 8)}, IDLE], 2),
        ([{**IDLE, "4": (GLOO, "S", 7, 7)}, IDLE], 2),
        ([{**IDLE, "4": (GLOO, "R", 7, 8)}] * 5 + [IDLE], 6),  # one thread that runs is enough
        ([IDLE, {"1": ("python", "R", 9, 9)}], 1),
        ([{**IDLE, "4": (GLOO, "R", 7, 8)}], 11),  # at most ten seconds
    ],
    ids=range(8),
)
def test_the_end_of_python_waits_until_gloo_rests(
    monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, Any]], sleeps: int
) -> None:
    """A thread rests if two looks find it asleep with the same counts."""
    threads = Threads(monkeypatch, *looks)
    groups._await_gloo()
    assert threads.sleeps == sleeps


def test_the_end_of_python_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(groups, "atexit", SimpleNamespace(register=registered.append))
    groups.rest_at_exit.__wrapped__()
    assert registered == [groups._await_gloo]


@pytest.mark.parametrize(
    ("user", "owner", "words"),
    [
        (8, 8, "process 7 is of user 8, this one of user 5; ranks must be processes of one user"),
        (8, 0, "process 7 is of user 8, this one of user 5; ranks must be processes of one user"),
        (
            5, 0,
            "process 7 is not dumpable: its program or launcher has asked for that, or it was started from a file with "
            "capabilities or a set-user-id bit; call prctl(PR_SET_DUMPABLE, 1) there before a buffer is made, or start "
            "it from a plain file",
        ),
        (
            5, 5,
            "process 7 is of the same user, but it has capabilities that this one lacks, or a security module keeps "
            "them apart; start all ranks alike",
        ),
    ],
)  # fmt: skip
def test_why_a_process_is_closed(monkeypatch: pytest.MonkeyPatch, user: int, owner: int, words: str) -> None:
    """The user is the effective one of four in the status, whose name may contain any bytes."""

    def read_text(encoding: str, errors: str) -> str:
        text = b"Name:\t\xff\nState:\tS\nUid:\t3\t%d\t4\t4\nGid:\t9\t9\t9\t9\n" % user
        return text.decode(encoding, errors)

    monkeypatch.setattr(processes.os, "stat", lambda path: SimpleNamespace(st_uid={"/proc/7/status": owner}[path]))
    monkeypatch.setattr(processes.os, "geteuid", lambda: 5)
    monkeypatch.setattr(processes, "Path", lambda path: {"/proc/7/status": SimpleNamespace(read_text=read_text)}[path])
    assert processes.why_closed(7) == words


def test_cores_that_the_system_does_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> None:
        raise OSError

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    for cores, expected in ((5, 5), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert processes.num_cores([1]) == expected


def test_a_watch_of_a_process_that_is_gone() -> None:
    watched = processes.Watch(2**30)
    assert watched.has_ended()
    descriptor = watched.descriptor
    assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
    del watched
    assert not Path(f"/proc/self/fd/{descriptor}").exists()


class Gpu:
    """Streams and memory of a GPU that is not there; calls are noted by thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: dict[str, list[Any]] = {}
        self.made = 0
        monkeypatch.setattr(thread_ranks, "_streams", {})
        monkeypatch.setattr(thread_ranks.torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(thread_ranks.torch.cuda, "device", lambda where: self.within("device", where))
        monkeypatch.setattr(thread_ranks.torch.cuda, "stream", lambda stream: self.within("stream", stream.number))
        monkeypatch.setattr(
            thread_ranks.torch.autograd, "set_multithreading_enabled", lambda on: self.within("several threads", on)
        )
        empty = torch.empty
        monkeypatch.setattr(
            thread_ranks.torch,
            "empty",
            lambda *given, **named: self.note("empty", *given, named) if "device" in named else empty(*given, **named),
        )

    def note(self, *what: Any) -> None:
        self.did.setdefault(threading.current_thread().name, []).append(what)

    def stream(self, where: Any) -> Any:
        self.made += 1
        return SimpleNamespace(number=self.made, where=where, synchronize=lambda: self.note("synchronized"))

    @contextmanager
    def within(self, *what: Any) -> Any:
        self.note(*what)
        try:
            yield
        finally:
            self.note("left", what[0])


CUDA = torch.device("cuda", 1)


def test_streams_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are always the same, and more are made as they are needed."""
    gpu = Gpu(monkeypatch)
    two = thread_ranks.streams_of(CUDA, 2)
    assert [stream.where for stream in two] == [CUDA] * 2
    three = thread_ranks.streams_of("cuda:1", 3)
    assert three[:2] == two
    assert thread_ranks.streams_of(SimpleNamespace(device=CUDA), 1) == two[:1]
    assert gpu.made == 3
    assert thread_ranks.streams_of("cpu", 2) == [None, None]
    assert [thread_ranks.on_gpu(device) for device in (CUDA, "cpu", SimpleNamespace(device=CUDA))] == [
        True,
        False,
        True,
    ]


def test_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {CUDA: SimpleNamespace(multi_processor_count=132)}
    monkeypatch.setattr(thread_ranks.torch.cuda, "get_device_properties", lambda where: found[where])
    assert thread_ranks.num_sms("cuda:1") == 132
    assert thread_ranks.num_sms(SimpleNamespace(device=torch.device("cpu"), num_sms=4.0)) == 4


@pytest.mark.parametrize("reserve", [0, 5])
def test_ranks_on_streams(monkeypatch: pytest.MonkeyPatch, reserve: int) -> None:
    """Each has memory on its stream before any begins, runs its backwards itself, and waits for its work at the end."""
    gpu = Gpu(monkeypatch)

    def work(group: Any) -> int:
        gpu.note("work")
        if group.rank == 1:
            raise ValueError("odd")
        return 7

    ranks = ThreadRanks(2, CUDA, reserve_bytes=reserve)
    first, second = ranks.outcomes(work)
    assert (first, type(second)) == (7, ValueError)
    on = {"dtype": torch.uint8, "device": CUDA}
    blocks = [("empty", 1 << 20, on)] * 16 + [("empty", reserve, on)] if reserve else []
    for rank in range(2):
        did = gpu.did[f"rank {rank}"]
        begin = [("device", CUDA), ("stream", rank + 1), ("several threads", False), *blocks, ("work",)]
        end = [("left", name) for name in ("several threads", "stream", "device")]
        assert did == [*begin, ("synchronized",), *end]


def test_streams_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    own = [gpu.stream(CUDA) for _ in range(2)]
    assert ThreadRanks(2, CUDA, streams=own, reserve_bytes=0).run(lambda group: group.rank) == [0, 1]
    assert gpu.made == 2
    assert [("stream", 1) in gpu.did["rank 0"], ("stream", 2) in gpu.did["rank 1"]] == [True, True]
