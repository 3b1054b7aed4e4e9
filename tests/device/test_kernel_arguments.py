"""Arguments of a rank's kernels: tables of the group, links, shared memory; and what a launcher keeps alive."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.routing import make_spec
from torch import Tensor

from moe_rt import _engine
from moe_rt.config.topology import Topology
from moe_rt.engine.gpu import launcher
from moe_rt.engine.gpu.launcher import RING_KERNELS, Launcher
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM
from moe_rt.errors import InvalidConfig
from moe_rt.memory.segments import GinWindow, Segments

MARK, CHANNEL, BLOCKS = 991, 1, 6
STRUCTS = ("World", "Nodes", "Links", "Control")


class Struct:
    """A struct of C++ as it was filled; its address names it in the arguments of a launch."""

    def __init__(self, **fields: Any) -> None:
        self.fields, self.address, self.tag = fields, id(self), None

    def over_gin(self, **fields: Any) -> None:
        self.fields["gin"] = fields


class Gpu:
    """Records uploads, compiled sources and launches. `bulk_bytes` is the room for rings."""

    def __init__(self, bulk_bytes: int = 0) -> None:
        self.bulk_bytes, self.tables = bulk_bytes, dict[int, tuple[torch.dtype, list[int]]]()
        self.compiled: list[Any] = []
        self.launched: list[Any] = []

    def upload(self, values: Tensor) -> Tensor:
        assert values.device.type == "cpu"
        copy = values.clone()
        self.tables[copy.data_ptr()] = values.dtype, values.tolist()
        return copy

    def host_bytes(self, num_bytes: int) -> Tensor:
        assert num_bytes == _engine.HOST_RECORD_BYTES
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def kernels(self, source: str, defines: dict[str, Any], *, library: Any = None, own_shared: Any = None) -> Any:
        self.compiled.append((source, defines["MOE_RT_THREADS"], library, own_shared))
        number = len(self.compiled) - 1
        return SimpleNamespace(launch=lambda launches, **how: self.launched.append((number, launches, how)))


Make = Callable[..., tuple[Launcher, Any, dict[str, Struct]]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return make(spec, rank, segments, network, ...), which returns a launcher, its GPU, and the last structs."""

    def making(
        spec: Any, rank: int, segments: Segments, network: Segments | None = None, *, bulk_bytes: int = 0,
        num_sms: int | None = None,
    ) -> tuple[Launcher, Any, dict[str, Struct]]:  # fmt: skip
        made: dict[str, Struct] = {}

        def fill(name: str) -> Callable[..., Struct]:
            def filled(**fields: Any) -> Struct:
                made[name] = Struct(**fields)
                return made[name]

            return filled

        for name in STRUCTS:
            monkeypatch.setattr(launcher._engine, name, fill(name))
        gpu: Any = Gpu(bulk_bytes)
        it = Launcher(
            spec, rank, segments, network, gpu, timeout_s=2.0, max_blocks=BLOCKS, num_sms=num_sms, channel=CHANNEL,
            plan_mark=MARK,
        )  # fmt: skip
        return it, gpu, made

    return making


def shown(gpu: Any, struct: Struct) -> dict[str, Any]:
    """Return the fields of a struct; a table's address becomes its dtype and values."""
    fields = {name: value for name, value in struct.fields.items() if name not in ("shape", "nodes")}
    return {name: gpu.tables.get(value, value) if isinstance(value, int) else value for name, value in fields.items()}


def ints(*values: int) -> tuple[torch.dtype, list[int]]:
    return torch.int32, list(values)


def addresses(*values: int) -> tuple[torch.dtype, list[int]]:
    return torch.int64, list(values)


def spread(num_ranks: int, **changes: Any) -> Any:
    """Return a spec whose experts are not in the order of their ranks."""
    return make_spec(
        num_ranks, num_experts=4, num_topk=2, placement=[2, 0, 1, 0], num_max_tokens_per_rank=64, **changes
    )


def test_the_world_of_ranks_that_map_each_other(make: Make) -> None:
    spec = spread(3, depth=2)
    it, gpu, made = make(spec, 1, Segments([160, 320, 480], [], []))
    tables = _engine.PlacementTables([2, 0, 1, 0], 3)
    assert shown(gpu, made["World"]) == {
        "channel": CHANNEL,
        "rank": 1,
        "config_hash": spec.hash(),
        "position": ints(3, 0, 2, 1),
        "owner": ints(0, 0, 1, 2),
        "rank_first": ints(0, 2, 3, 4),
        "entries": ints(*tables.entries),
        "base": addresses(160, 320, 480),
        "mirror": 0,
        "plan_mark": MARK,
    }
    assert made["World"].fields["nodes"] is made["Nodes"]
    assert made["Nodes"].fields == made["Links"].fields == {}
    assert (it.channel, it.max_blocks, it.num_clients, it.whole, it.ring) == (CHANNEL, BLOCKS, 0, False, None)
    assert gpu.compiled == [("kernels.cu", spec.tuning.threads, None, {})]
    assert shown(gpu, made["Control"]) == {
        "state": (torch.uint8, list(_engine.device_state())),
        "record": it.record.data_ptr(),
        "timeout_ns": 2 * 10**9,
        "tag": 0,
        "may_overflow": False,
    }


def test_links_to_peers_that_are_not_mapped(make: Make) -> None:
    spec = spread(3)
    threads = spec.tuning.network_threads
    layout = _engine.NetworkLayout(spec.gpu_shape(), BLOCKS * threads // 32)
    segments, network = Segments([160, 0, 480], [], []), Segments([1600, 3200, 4800], [], [])
    _, gpu, made = make(spec, 0, segments, network)
    assert shown(gpu, made["Links"]) == {
        "segment": 160,
        "outbox": 1600,
        "staging": 1600 + layout.staging,
        "warp_bytes": layout.warp_bytes,
        "segments": addresses(160, 0, 480),
    }
    world = shown(gpu, made["World"])
    assert world["base"] == addresses(160, 0, 480)
    assert world["mirror"] == addresses(0, 1600 + layout.mirrors + layout.mirror_bytes, 0)
    assert gpu.compiled == [("kernels_rdma.cu", threads, None, {})]


@pytest.mark.parametrize("gin", [False, True])
def test_links_over_symmetric_memory(make: Make, gin: bool) -> None:
    spec = spread(3)
    windows = (GinWindow(7, 8), GinWindow(7, 9)) if gin else (None, None)
    segments = Segments([160, 0, 480], [], [], symmetric=64, gin=windows[0])
    network = Segments([1, 2, 3], [], [], symmetric=6400, gin=windows[1])
    _, gpu, made = make(spec, 0, segments, network)
    layout = _engine.NetworkLayout(spec.gpu_shape(), BLOCKS * spec.tuning.network_threads // 32)
    over = {"communicator": 7, "segment_window": 8, "memory_window": 9}
    over["segment_bytes"] = spec.gpu_shape().segment_bytes()
    assert shown(gpu, made["Links"]) == {
        "segment": 64,
        "outbox": 6400,
        "staging": 6400 + layout.staging,
        "warp_bytes": layout.warp_bytes,
        "segments": 0,
        **({"gin": over} if gin else {}),
    }
    source, library = ("kernels_gin.cu", NCCL) if gin else ("kernels_rdma.cu", NVSHMEM)
    assert gpu.compiled == [(source, spec.tuning.network_threads, library, {})]


def test_nodes_and_their_proxies(make: Make) -> None:
    nodes = (0, 0, 1, 1)
    spec = replace(make_spec(4, num_experts=4), route="two_level", topology=Topology(nodes))
    segments, network = Segments([160, 320, 480, 640], [], []), Segments([1600] * 4, [], [])
    it, gpu, made = make(spec, 1, segments, network)
    who, shape = _engine.NodeTables(nodes, 1), spec.gpu_shape()
    assert who.clients == [3]
    assert shown(gpu, made["Nodes"]) == {
        "own": 0,
        "num_clients": 1,
        "node_of": ints(*nodes),
        "proxy_of": ints(*who.proxies),
        "client_index": ints(*who.client_index),
        "clients": ints(3),
        "proxy_on": ints(*who.proxy_on),
    }
    assert it.num_clients == 1
    world = shown(gpu, made["World"])
    assert world["base"] == addresses(160, 320, 0, 0)
    staged = [[160, 320][who.proxies[peer]] + shape.staged_at(who.client_index[peer]) for peer in (2, 3)]
    assert world["mirror"] == addresses(0, 0, *staged)
    assert gpu.compiled == [("kernels_nodes_mapped.cu", spec.tuning.network_threads, None, {})]


def test_a_launch_has_the_arguments_of_its_op_and_of_all_kernels(make: Make) -> None:
    spec = spread(3)
    it, gpu, made = make(spec, 2, Segments([160, 320, 480], [], []))
    shared_bytes = _engine.scratch_bytes(spec.gpu_shape(), [2, 0, 1, 0], 2, spec.tuning.threads)
    for tag, launch in ((5, it.launch), (6, it.launch_half)):
        args: Any = SimpleNamespace(address=12345 + tag)
        it.set_call(args, tag)
        launch([("a kernel", 2), ("another", 1)], 70 + tag)
        kernels, launches, how = gpu.launched[-1]
        params = how.pop("params")
        assert (kernels, launches) == (0, [("a kernel", 2), ("another", 1)])
        assert how == {"threads": spec.tuning.threads, "shared_bytes": shared_bytes, "stream": 70 + tag}
        assert isinstance(params, ctypes.Array)
        assert list(params) == [made["World"].address, made["Control"].address, made["Links"].address, 12345 + tag]
        assert made["Control"].tag == tag


def test_arguments_live_until_the_next_call(make: Make) -> None:
    it, _, _ = make(spread(3), 0, Segments([160, 320, 480], [], []))

    class Args(SimpleNamespace):
        pass

    seen = []
    for number in range(3):
        args: Any = Args(address=number)
        seen.append(weakref.ref(args))
        it.set_call(args, 0)
    del args
    gc.collect()
    assert [ref() is not None for ref in seen] == [False, False, True]


def test_tables_and_structs_live_as_long_as_the_launcher(make: Make) -> None:
    it, gpu, made = make(spread(3), 0, Segments([160, 320, 480], [], []))
    assert {t.data_ptr() for t in it.memory} == set(gpu.tables)
    assert len(it.memory) == 6, "four of the placement, the segments, and the state"
    kept = [weakref.ref(made[name]) for name in ("World", "Control", "Links")]
    made.clear()
    gc.collect()
    assert all(ref() is not None for ref in kept)


@pytest.mark.parametrize("num_sms", [8, None])
def test_rings_have_room_in_the_blocks_of_kernels_that_move_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_sms: int | None
) -> None:
    spec, bulk = spread(3, hidden=7168, dtype=torch.bfloat16), 227 << 10
    asked: list[dict[str, int]] = []
    ring = launcher._engine.RingMemory
    monkeypatch.setattr(launcher._engine, "RingMemory", lambda **given: asked.append(given) or ring(**given))
    it, gpu, made = make(spec, 0, Segments([160, 320, 480], [], []), bulk_bytes=bulk, num_sms=num_sms)
    warps = spec.tuning.threads // 32
    scratch = _engine.scratch_bytes(spec.gpu_shape(), [2, 0, 1, 0], 0, spec.tuning.threads)
    it.set_call(SimpleNamespace(address=4), 0)  # type: ignore[arg-type]
    it.launch([("dispatch_send", 1)], 0)
    third = gpu.launched[0][2]["params"][2]
    if num_sms is None:
        assert (it.ring, asked, third) == (None, [], made["Links"].address)
        assert gpu.compiled == [("kernels.cu", spec.tuning.threads, None, {})]
        return
    assert asked == [{"scratch_bytes": scratch, "block_bytes": bulk, "warps": warps, "num_topk": 2}]
    assert it.ring is not None
    assert third == it.ring.address
    room = it.ring.at + warps * it.ring.bytes
    assert scratch < room <= bulk
    assert gpu.compiled == [("kernels_ring.cu", spec.tuning.threads, None, dict.fromkeys(RING_KERNELS, room))]


def test_rings_are_neither_for_very_few_tokens_nor_for_a_network(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spread(3, hidden=7168, dtype=torch.bfloat16)
    segments = Segments([160, 320, 480], [], [])
    more: dict[str, Any] = {"bulk_bytes": 227 << 10, "num_sms": 8}
    _, gpu, _ = make(spec, 0, segments, Segments([1600] * 3, [], []), **more)
    assert gpu.compiled[0][::3] == ("kernels_rdma.cu", {})
    monkeypatch.setattr(launcher._engine, "whole_tokens", lambda shape: 64)
    it, gpu, _ = make(spec, 0, segments, **more)
    assert it.whole
    assert gpu.compiled[0][::3] == ("kernels_whole.cu", {})
    it, _, _ = make(spec, 0, segments, Segments([1600] * 3, [], []), **more)
    assert not it.whole, "an op over a network is several launches"


@pytest.mark.parametrize(("bytes_more", "rings"), [(-1, True), (0, False), (1, False)])
def test_rings_must_have_more_under_way_than_registers(bytes_more: int, rings: bool) -> None:
    spec = spread(3, hidden=7168, dtype=torch.bfloat16)
    room: dict[str, int] = {"scratch_bytes": 9000, "bulk_bytes": 227 << 10, "warps": 16}
    found = launcher.ring_for(spec, 8, **room)
    assert found is not None
    most = 16 * _engine.RING_LOADS * found.piece
    assert launcher.under_way(found, 16) == most
    tuning = replace(spec.tuning, ring_bytes=most + bytes_more)
    assert (launcher.ring_for(replace(spec, tuning=tuning), 8, **room) is not None) is rings


def test_a_failure_is_read_from_the_record(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it, _, _ = make(spread(3), 0, Segments([160, 320, 480], [], []))
    monkeypatch.setattr(launcher._engine, "reported", lambda address: ("a failure at", address))
    assert it.reported() == ("a failure at", it.record.data_ptr())


def test_nodes_need_a_network_of_nccl_that_is_there(make: Make) -> None:
    segments = Segments([160, 0, 480], [], [], symmetric=64, gin=GinWindow(0, 8))
    with pytest.raises(InvalidConfig) as raised:
        make(spread(3), 0, segments, Segments([1, 2, 3], [], [], symmetric=6400, gin=GinWindow(0, 9)))
    expected = "one that connects all GPUs, for rows in two levels; NCCL_DEBUG=INFO says why there is none"
    assert raised.value.args[0] == f'heap "gin": got no network of NCCL\'s, expected {expected}'


@pytest.mark.parametrize("blocks", [1, 6])
def test_memory_of_a_network_is_for_all_warps_that_may_wait(blocks: int) -> None:
    spec = spread(3)
    warps = blocks * spec.tuning.network_threads // 32
    assert launcher.network_bytes(spec, blocks) == _engine.NetworkLayout(spec.shape(), warps).bytes
