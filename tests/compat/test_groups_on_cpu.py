"""Calls of torch.distributed and of the command that `moe-rt on-cpu` changes, as gloo and ranks receive them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch.distributed import device_mesh, distributed_c10d

from moe_rt.cli import main
from moe_rt.lab.on_cpu import cli, groups, hooks
from moe_rt.lab.on_cpu.hooks import NotOnCpu
from moe_rt.lab.on_cpu.triton import Kernel, fill, refuse_launches

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
MOVES = ("all_to_all_single", "all_to_all", "all_gather", "broadcast", "scatter", "gather", "send", "recv", "isend",
         "irecv")  # fmt: skip
CHANGED = (*MOVES, "init_process_group", "new_group", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor",
           "barrier")  # fmt: skip


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """Change torch.distributed, whose functions list their calls; afterwards it is as before."""
    homes: list[Any] = [dist, distributed_c10d, device_mesh]
    before, start = [dict(vars(home)) for home in homes], device_mesh.DeviceMesh.__init__
    seen: list[Any] = []

    def listed(name: str) -> Any:
        def called(*arguments: Any, **keywords: Any) -> str:
            seen.append((arguments, keywords))
            return f"result of {name}"

        called.__name__ = name
        return called

    for name in CHANGED:
        setattr(dist, name, listed(name))
    dist.get_world_size = lambda group=None: 4 if group is None else 2
    device_mesh.init_device_mesh = listed("init_device_mesh")
    device_mesh.DeviceMesh.__init__ = lambda self, *given, **how: seen.append((given, how))  # type: ignore[method-assign]
    for home in homes:
        vars(home).pop("ProcessGroupNCCL", None)
    distributed_c10d.ProcessGroupNCCL = "of torch"  # type: ignore[assignment,misc]
    groups.change()
    yield seen
    for home, values in zip(homes, before, strict=True):
        vars(home).clear()
        vars(home).update(values)
    device_mesh.DeviceMesh.__init__ = start  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("arguments", "keywords", "passed"),
    [
        ((), {}, ((), {"backend": "gloo"})),
        (("nccl",), {}, (("gloo",), {})),
        (("cpu:gloo,cuda:nccl", "env://"), {"rank": 1}, (("gloo", "env://"), {"rank": 1})),
        (("mpi",), {"device_id": None}, (("mpi",), {"device_id": None})),
        ((None,), {}, (("gloo",), {})),
        ((), {"backend": "nccl", "device_id": 3, "pg_options": 4},
         ((), {"backend": "gloo", "device_id": None, "pg_options": None})),
        ((), {"backend": "gloo", "world_size": 2}, ((), {"backend": "gloo", "world_size": 2})),
    ],
)  # fmt: skip
def test_process_groups_are_gloos(calls: list[Any], arguments: Any, keywords: Any, passed: Any) -> None:
    assert dist.init_process_group(*arguments, **keywords) == "result of init_process_group"
    assert calls == [passed]


@pytest.mark.parametrize(
    ("arguments", "keywords", "passed"),
    [
        (([0, 1],), {}, (([0, 1],), {})),
        (([0],), {"backend": None}, (([0],), {"backend": None})),
        ((), {"ranks": [1], "backend": "nccl", "pg_options": 2, "device_id": 3},
         ((), {"ranks": [1], "backend": "gloo", "pg_options": None, "device_id": None})),
        ((), {"backend": "mpi"}, ((), {"backend": "mpi"})),
    ],
)  # fmt: skip
def test_further_groups_are_gloos(calls: list[Any], arguments: Any, keywords: Any, passed: Any) -> None:
    assert dist.new_group(*arguments, **keywords) == "result of new_group"
    assert calls == [passed]


@pytest.mark.parametrize("group", [None, "a group"])
@pytest.mark.parametrize("later", [False, True])
def test_averages_are_sums_that_are_divided(calls: list[Any], group: Any, later: bool) -> None:
    """The size of the group is the divisor; work of a call that does not wait is complete."""
    of = {} if group is None else {"group": group}
    how = {"async_op": True} if later else {}
    x, other = torch.full((2,), 8.0), torch.ones(4)
    size = 4 if group is None else 2
    found = [
        dist.all_reduce(x, AVG, **of, **how),
        dist.all_reduce(x, op=AVG, **of, **how),
        dist.reduce_scatter_tensor(x, other, AVG, **of, **how),
        dist.reduce_scatter_tensor(x, input=other, op=AVG, **of, **how),
    ]
    assert calls == [((x,), {"op": SUM, **of})] * 2 + [((x,), {"input": other, "op": SUM, **of})] * 2
    assert x.tolist() == [8.0 / size**4] * 2
    for work in found:
        assert work is None if not later else work.wait() is True and work.is_completed() is True


def test_other_reductions_stay_as_they_are(calls: list[Any]) -> None:
    x, other = torch.ones(2), torch.ones(4)
    assert dist.all_reduce(x, SUM, "a group", True) == "result of all_reduce"
    assert dist.all_reduce(x) == "result of all_reduce"
    assert dist.reduce_scatter_tensor(x, other, SUM, "a group") == "result of reduce_scatter_tensor"
    how = {"op": SUM, "group": "a group"}
    assert calls == [((x,), {**how, "async_op": True}), ((x,), {}), ((x,), {"input": other, **how})]
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int8, torch.bfloat16])
def test_eight_bit_floats_move_as_bytes(calls: list[Any], dtype: torch.dtype) -> None:
    moved = torch.uint8 if dtype.itemsize == 1 and dtype.is_floating_point else dtype
    x, y = torch.ones(4).to(dtype), torch.zeros(2, 2).to(dtype)
    for name in MOVES:
        assert getattr(dist, name)([x, y], (y,), x, other=y, src=1, group=None) == f"result of {name}"
        (first, second, third), keywords = calls.pop()
        tensors = [*first, *second, third, keywords.pop("other")]
        assert keywords == {"src": 1, "group": None}
        assert [t.dtype for t in tensors] == [moved] * 5
        for got, given in zip(tensors, (x, y, y, x, y), strict=True):
            assert got.data_ptr() == given.data_ptr()
            assert got.shape == given.shape
    into, rows = torch.zeros(2, 6).to(dtype), torch.arange(6.0).view(3, 2).T.to(dtype)
    assert dist.all_gather_into_tensor(into, rows, "a group", True) == "result of all_gather_into_tensor"
    assert dist.all_gather_into_tensor(into, rows) == "result of all_gather_into_tensor"
    for (to, source, *rest), keywords in calls:
        assert (to.shape, to.dtype, source.dtype, keywords) == ((12,), moved, moved, {})
        assert to.data_ptr() == into.data_ptr()
        assert source.view(dtype).float().tolist() == [0, 2, 4, 1, 3, 5]
        assert rest in (["a group", True], [None, False])
    assert [rest for (_, _, *rest), _ in calls] == [["a group", True], [None, False]]


def test_barriers_have_no_devices(calls: list[Any]) -> None:
    for given, how, passed in (((), {}, (None, False)), (("a group", True), {"device_ids": [1]}, ("a group", True))):
        assert dist.barrier(*given, **how) == "result of barrier"  # type: ignore[arg-type]
        assert calls.pop() == (passed, {})


def test_meshes_are_of_the_cpu(calls: list[Any]) -> None:
    named: Any = dist
    named.init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))
    device_mesh.init_device_mesh(device_type="cuda:1", mesh_shape=(2,))
    device_mesh.DeviceMesh("cuda", [0, 1])
    device_mesh.DeviceMesh("cpu", mesh=[0])
    assert calls == [
        (("cpu", (2,)), {"mesh_dim_names": ("ep",)}), ((), {"device_type": "cpu", "mesh_shape": (2,)}),
        (("cpu", [0, 1]), {}), (("cpu",), {"mesh": [0]}),
    ]  # fmt: skip


def test_nccl_seems_to_be_there(calls: list[Any]) -> None:
    """Options can be set and are ignored; torch's own class stays where there is one."""
    assert dist.is_nccl_available()
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.cga_cluster_size = 2
    assert distributed_c10d.ProcessGroupNCCL == "of torch"  # type: ignore[comparison-overlap]
    for name in CHANGED:
        assert getattr(dist, name) is getattr(distributed_c10d, name)


def test_a_torch_without_distributed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    before = {name: getattr(dist, name) for name in CHANGED}
    groups.change()
    assert before == {name: getattr(dist, name) for name in CHANGED}


class Rank:
    """A process that ends by itself, when it is terminated, or when it is killed."""

    def __init__(self, status: int | None, polls: int = 1, stubborn: bool = False) -> None:
        self.status, self.polls, self.stubborn, self.seen = status, polls, stubborn, list[str]()

    def poll(self) -> int | None:
        self.polls -= 1
        return self.status if self.polls < 0 else None

    def terminate(self) -> None:
        self.seen.append("terminate")
        if not self.stubborn:
            self.status, self.polls = -15, 0

    def kill(self) -> None:
        self.seen.append("kill")
        self.stubborn = False

    def wait(self, seconds: float | None = None) -> int | None:
        self.seen.append(f"wait {seconds}")
        if self.stubborn:
            raise subprocess.TimeoutExpired("rank", seconds or 0)
        return self.status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        cli, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=lambda s: setattr(found, "now", found.now + s))
    )
    return found


@pytest.fixture
def started(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return ranks that the command starts, with their commands and environments."""
    found = SimpleNamespace(ranks=[], given=[])

    def popen(command: Any, env: Any) -> Rank:
        found.given.append((command, env))
        rank: Rank = found.ranks[len(found.given) - 1]
        return rank

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(cli, "free_ports", lambda: 4321)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(hooks.DEVICES, raising=False)
    return found


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["on-cpu", *words])


HEAD = "moe-rt on-cpu: cuda is the CPU, nccl is gloo, deep_ep is moe_rt.compat.deep_ep\n"


@pytest.mark.parametrize(("count", "devices", "threads"), [(2, "8", None), (9, "9", "3")])
def test_the_variables_of_ranks(
    started: SimpleNamespace, count: int, devices: str, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are torchrun's; there are at least eight devices, and a thread for each rank unless the user has chosen."""
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    started.ranks = [Rank(0) for _ in range(count)]
    result = call("--ranks", str(count), "--", "sh", "-c", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", HEAD)
    for rank, (command, variables) in enumerate(started.given):
        assert command == (cli._program("sh"), "-c", "x")
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(count),
               "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321",
               "OMP_NUM_THREADS": threads or "1"}  # fmt: skip
        assert variables == {**os.environ, **hooks.environment(int(devices)), **own}
        assert variables[hooks.DEVICES] == devices
    assert len(started.given) == count


def test_a_program_without_ranks_takes_the_place_of_the_command(
    started: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []

    def execve(*given: Any) -> None:
        ended.append(given)
        raise SystemExit(5)

    monkeypatch.setattr(os, "execve", execve)
    result = call("--", "sh", "-c", "x")
    assert (result.exit_code, result.stderr) == (5, HEAD)
    program = cli._program("sh")
    assert ended == [(program, (program, "-c", "x"), {**os.environ, **hooks.environment(8)})]
    assert not started.given


@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [([0, 0], 0, ""), ([0, 7], 7, "rank 1 ended with status 7"), ([1, None], 1, "rank 0 ended with status 1"),
     ([None, -9], 137, "rank 1 ended with status -9"), ([-15, None], 143, "rank 0 ended with status -15")],
)  # fmt: skip
def test_the_first_failure_gives_the_status(
    started: SimpleNamespace, clock: SimpleNamespace, statuses: list[Any], status: int, said: str
) -> None:
    """Ranks of a failed group have ten seconds to raise their own errors; then they are terminated."""
    started.ranks = [Rank(s, polls=3 if s is not None else 10**9) for s in statuses]
    result = call("--ranks", "2", "--", "sh")
    assert result.exit_code == status
    assert result.stderr == HEAD + (f"moe-rt on-cpu: {said}\n" if said else "")
    late = [rank for rank, s in zip(started.ranks, statuses, strict=True) if s is None]
    assert all(rank.seen == ["terminate", "wait 10.0"] for rank in late)
    assert all(rank.seen == ["wait 10.0"] for rank in started.ranks if rank not in late)
    assert clock.now == pytest.approx(100.2 + (10.0 if late else 0.0), abs=0.051)


def test_a_rank_that_ignores_its_end_is_killed(started: SimpleNamespace) -> None:
    started.ranks = [Rank(3), Rank(None, 10**9, stubborn=True), Rank(0)]
    assert call("--ranks", "3", "--", "sh").exit_code == 3
    assert started.ranks[1].seen == ["terminate", "wait 10.0", "kill", "wait None"]
    assert started.ranks[2].seen == ["wait 10.0"]


def test_what_is_no_program(started: SimpleNamespace) -> None:
    result = call("--", "--rank", "2")
    assert result.exit_code == 2
    assert "No such option '--rank'" in result.output
    assert "--ranks" in result.output
    result = call("--ranks", "2", "--", "no-such-program")
    assert result.exit_code == 1
    said = "COMMAND: got no-such-program, expected a program that can be run, as in: python no-such-program"
    assert said in result.output
    assert not started.given
    assert call("--ranks", "0", "--", "sh").exit_code == 2


def test_programs_next_to_python_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on PATH come first."""
    for directory in ("path", "python"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "torchrun").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python/python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert cli._program("torchrun") == str(tmp_path / "path/torchrun")
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli._program("torchrun") == str(tmp_path / "python/torchrun")


def test_variables_that_activate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children have them too, and keep the user's paths and interface."""
    for name in ("PYTHONPATH", "GLOO_SOCKET_IFNAME", hooks.DEVICES):
        monkeypatch.delenv(name, raising=False)
    fixed = {"MOE_RT_ON_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
    assert hooks.environment(5) == {
        **fixed, "MOE_RT_ON_CPU_DEVICES": "5", "PYTHONPATH": hooks.SITE, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    assert (Path(hooks.SITE) / "sitecustomize.py").is_file()
    assert hooks.num_devices() == 8
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", "", hooks.SITE, "/b"]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv(hooks.DEVICES, "3")
    found = hooks.environment(1)
    assert found["PYTHONPATH"] == os.pathsep.join([hooks.SITE, "/a", "/b"])
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert hooks.num_devices() == 3


def test_which_deep_ep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Finder:
        def find_spec(self, name: str, path: Any) -> ModuleSpec | None:
            asked.append((name, path))
            return ModuleSpec(name, None, origin="/site/deep_ep.py") if name == "deep_ep" else None

    assert hooks.which_deep_ep() == "moe_rt.compat.deep_ep"
    monkeypatch.setattr(sys, "meta_path", [hooks._Finder(), Finder()])
    assert hooks.which_deep_ep() == (
        "the installed deep_ep in /site/deep_ep.py, which needs a GPU; uninstall it to use moe_rt.compat.deep_ep"
    )
    assert asked == [("deep_ep", None)]


def test_kernels_of_an_installed_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is named also through an autotuner; its class stays triton's."""
    homes = {"triton.runtime.jit": "JITFunction", "triton.runtime.autotuner": "Autotuner"}
    kinds = {}
    for home, kind in homes.items():
        module = ModuleType(home)
        kinds[kind] = type(kind, (), {"__init__": lambda self, fn: setattr(self, "fn", fn), "run": None})
        setattr(module, kind, kinds[kind])
        monkeypatch.setitem(sys.modules, home, module)

    def twice() -> None: ...

    refuse_launches()
    kernel: Any = kinds["JITFunction"](twice)
    for each in (kernel, kinds["Autotuner"](kernel), kinds["Autotuner"](kinds["Autotuner"](kernel))):
        with pytest.raises(NotOnCpu, match="triton kernel twice: got a launch on CPU ranks, which run no triton"):
            each.run(1, grid=(1,))
    with pytest.raises(NotOnCpu, match="triton kernel 5: got a launch"):
        kinds["JITFunction"](5).run()


def test_names_of_a_stand_in() -> None:
    """They serve as types, bases and items of annotations; only triton's own module has its decorators."""
    triton, language, other = (ModuleType(name) for name in ("triton", "triton.language", "triton.runtime"))
    for module in (triton, language, other):
        fill(module)
        assert module.__version__ == "0.0+moe_rt"
    name = other.jit
    assert repr(name) == "triton.runtime.jit"
    assert name[1] is name
    assert (name | int) is (int | name) is Any

    class Own(name): ...  # type: ignore[misc,valid-type]

    assert Own.__bases__ == (object,)
    assert repr(triton.constexpr) == "triton.constexpr"
    assert repr(language.jit) == "triton.language.jit"
    assert [triton.next_power_of_2(n) for n in (-1, 0, 1, 7, 8, 9)] == [1, 1, 1, 8, 8, 16]
    with pytest.raises(AttributeError, match="module 'triton' has no attribute '__file"):
        triton.__file  # noqa: B018
    three = language.constexpr(3)
    assert (three == 3, three == 4, hash(three), [0, 1, 2, 3][three]) == (True, False, hash(3), 3)
    for make in (triton.heuristics(values={}), triton.autotune([], ["n"]), triton.jit):
        assert make(len).fn is len
    kernel = triton.jit(5)
    assert isinstance(kernel, Kernel)
    assert (kernel.__name__, kernel.__doc__, kernel.arg_names) == ("5", int.__doc__, [])
    with pytest.raises(NotOnCpu, match="triton kernel 5: got a launch"):
        kernel[1,]()
