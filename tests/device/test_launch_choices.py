"""A rank launches the kernels of its heap and topology, and reaches its peers by the addresses of that heap."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.routing import make_spec
from torch import Tensor

from moe_rt import _engine
from moe_rt.config.codec import Codec
from moe_rt.config.topology import Topology
from moe_rt.engine.cuda import CudaEngine, blocks_of_a_wait
from moe_rt.engine.gpu import launcher
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM
from moe_rt.errors import InvalidConfig, Op
from moe_rt.memory.segments import GinWindow, Segments

GIN = GinWindow(7, 8)


def two_level(*nodes: int) -> Any:
    return replace(make_spec(len(nodes)), route="two_level", topology=Topology(nodes))


@pytest.mark.parametrize(
    ("nodes", "symmetric", "gin", "expected"),
    [
        (False, 0, None, ("kernels_rdma.cu", None)),
        (True, 0, None, ("kernels_nodes_mapped.cu", None)),
        (False, 4096, None, ("kernels_rdma.cu", NVSHMEM)),
        (True, 4096, None, ("kernels_nodes.cu", NVSHMEM)),
        (False, 4096, GIN, ("kernels_gin.cu", NCCL)),
        (True, 4096, GIN, ("kernels_nodes_gin.cu", NCCL)),
    ],
)
def test_kernels_over_a_network(nodes: bool, symmetric: int, gin: GinWindow | None, expected: Any) -> None:
    spec = two_level(0, 0, 1) if nodes else make_spec(3)
    assert launcher._over_network(spec, Segments([], [], [], symmetric=symmetric, gin=gin)) == expected


def test_ranks_of_other_nodes_are_not_loaded_from() -> None:
    segments = Segments([16, 32, 48], [], [])
    assert launcher._loadable(make_spec(3), 1, segments) == [16, 32, 48]
    spec = two_level(0, 1, 1)
    assert [launcher._loadable(spec, rank, segments) for rank in range(3)] == [[16, 0, 0], [0, 32, 48], [0, 32, 48]]
    with pytest.raises(ValueError, match="zip"):
        launcher._loadable(spec, 0, Segments([16, 32], [], []))


def test_windows_of_nccl() -> None:
    seen: list[dict[str, int]] = []
    links: Any = SimpleNamespace(over_gin=lambda **given: seen.append(given))
    launcher._go_over_gin(links, GIN, GinWindow(7, 9), 640)
    assert seen == [{"communicator": 7, "segment_window": 8, "memory_window": 9, "segment_bytes": 640}]
    for segment, memory in ((GinWindow(0, 8), GIN), (GIN, None)):
        with pytest.raises(InvalidConfig, match='heap "gin": got no network of NCCL'):
            launcher._go_over_gin(links, segment, memory, 640)
    assert len(seen) == 1


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_shared_memory_of_a_block(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    num_bytes = _engine.MAX_SCRATCH_BYTES + more
    given: list[Any] = []

    def scratch_bytes(shape: Any, placement: list[int], rank: int, threads: int) -> int:
        given.append((placement, rank, threads))
        return num_bytes

    monkeypatch.setattr(launcher._engine, "scratch_bytes", scratch_bytes)
    spec = make_spec(2)
    if more > 0:
        with pytest.raises(InvalidConfig, match=f"needs {num_bytes} bytes of shared memory, expected at most"):
            launcher._shared_bytes(spec, 1, 256)
    else:
        assert launcher._shared_bytes(spec, 1, 256) == num_bytes
    assert given == [(list(spec.placement.ranks), 1, 256)]


@pytest.mark.parametrize(
    ("segment", "network", "expected"),
    [((0, [16, 32, 48]), (0, [1600, 3200, 4800]), (32, 3200)), ((64, [16, 32, 48]), (6400, [1, 2, 3]), (64, 6400))],
)
def test_links_begin_at_the_network_s_name_for_memory_if_it_has_one(
    monkeypatch: pytest.MonkeyPatch, segment: Any, network: Any, expected: tuple[int, int]
) -> None:
    spec, rank = make_spec(3), 1
    uploads: list[Any] = []
    made: list[dict[str, int]] = []
    it: Any = SimpleNamespace(
        max_blocks=2, _threads=64, _upload=lambda values, dtype: uploads.append(list(values)) or 999
    )
    monkeypatch.setattr(launcher._engine, "Links", lambda **given: made.append(given))
    of_segments, of_network = (Segments(addresses, [], [], symmetric=at) for at, addresses in (segment, network))
    _, mirrors = launcher.Launcher._reach(it, spec, rank, of_segments, of_network, [16, 32, 0])
    layout = _engine.NetworkLayout(spec.gpu_shape(), 4)
    assert made == [
        {
            "segment": expected[0],
            "outbox": expected[1],
            "staging": expected[1] + layout.staging,
            "warp_bytes": layout.warp_bytes,
            "segments": 0 if segment[0] else 999,
        }
    ]
    assert uploads == ([] if segment[0] else [[16, 32, 48]])
    assert mirrors == [0, 0, expected[1] + layout.mirrors + 2 * layout.mirror_bytes]


class Gpu:
    """Records what is compiled, and launches nothing."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, dict[str, Any]]] = []
        self.uploaded: list[Tensor] = []
        self.launched: list[Any] = []
        self.bulk_bytes = 0

    def upload(self, values: Tensor) -> Tensor:
        self.uploaded.append(values.clone())
        return self.uploaded[-1]

    def host_bytes(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def kernels(self, source: str, defines: dict[str, Any], **options: Any) -> Gpu:
        self.compiled.append((source, defines))
        return self

    def launch(self, launches: Any, **given: Any) -> None:
        self.launched.append((launches, given["stream"]))


def made(monkeypatch: pytest.MonkeyPatch, spec: Any, timeout_s: float = 1.0) -> tuple[Any, Gpu, dict[str, Any]]:
    """Return a Launcher, its GPU, and the arguments that every kernel gets."""
    given: dict[str, Any] = {}
    real = _engine.Control
    monkeypatch.setattr(launcher._engine, "Control", lambda **named: given.update(named) or real(**named))
    gpu: Any = Gpu()
    segments = Segments([4096 * (r + 1) for r in range(spec.num_ranks)], [], [])
    turn = {"channel": 0, "plan_mark": 1}
    it = launcher.Launcher(spec, 0, segments, None, gpu, timeout_s=timeout_s, max_blocks=7, num_sms=None, **turn)
    monkeypatch.setattr(launcher._engine, "Control", real)
    return it, gpu, given


@pytest.mark.parametrize("timeout_s", [0.25, 1.0, 2.5, 1e9])
@pytest.mark.parametrize(
    ("changes", "may_overflow"),
    [
        ({}, False),
        ({"capacity_factor": 1.5}, True),
        ({"overflow": "drop"}, False),
        ({"capacity_factor": 1.5, "overflow": "drop"}, False),
    ],
    ids=str,
)
def test_limits_that_kernels_know(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], may_overflow: bool, timeout_s: float
) -> None:
    _, _, given = made(monkeypatch, replace(make_spec(2), **changes), timeout_s)
    assert (given["timeout_ns"], given["may_overflow"], given["tag"]) == (int(timeout_s * 1e9), may_overflow, 0)


def test_kernels_are_compiled_for_each_codec_and_order_of_sums() -> None:
    spec = make_spec(2, dtype=torch.bfloat16)
    plain = launcher.kernel_defines(spec, 96)
    assert plain["MOE_RT_THREADS"] == 96
    assert (plain["MOE_RT_HIDDEN"], plain["MOE_RT_TOPK"]) == (spec.hidden, spec.num_topk)
    for field, name, value, expected in (
        ("dispatch_dtype", "MOE_RT_DISPATCH_CODEC", torch.int8, Codec.INT8.enumerator),
        ("combine_dtype", "MOE_RT_COMBINE_CODEC", torch.int8, Codec.INT8.enumerator),
        ("sums", "MOE_RT_SUMS", "invariant", "kInvariant"),
    ):
        changed = launcher.kernel_defines(replace(spec, **{field: value}), 96)
        assert {n for n in plain if plain[n] != changed[n]} == {name}
        assert changed[name] == expected


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_op_of_few_tokens_is_one_launch(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    most = 64
    monkeypatch.setattr(launcher._engine, "whole_tokens", lambda shape: most)
    it, gpu, _ = made(monkeypatch, make_spec(2, num_max_tokens_per_rank=most + more))
    assert it.whole is (more <= 0)
    assert [source for source, _ in gpu.compiled] == ["kernels_whole.cu" if it.whole else "kernels.cu"]
    for stream in (3, 4):
        it.launch_half([("dispatch_send", 1)], stream)
    assert [source for source, _ in gpu.compiled] == ["kernels_whole.cu"] * it.whole + ["kernels.cu"], "once"
    assert gpu.compiled[0][1] == gpu.compiled[-1][1]
    assert gpu.launched == [([("dispatch_send", 1)], 3), ([("dispatch_send", 1)], 4)]


def test_a_launcher_keeps_what_its_launches_read(monkeypatch: pytest.MonkeyPatch) -> None:
    it, gpu, given = made(monkeypatch, make_spec(2))
    assert {t.data_ptr() for t in gpu.uploaded} == {t.data_ptr() for t in it.memory}
    assert given["record"] == it.record.data_ptr()
    for tag in (5, 0):
        args = _engine.EndArgs(code=tag)
        it.set_call(args, tag)
        assert it._args is args
        assert it._params[len(it._given)] == args.address
        assert it._control.tag == tag


WAITS = {Op.DISPATCH: "dispatch_wait", Op.COMBINE: "combine_wait", Op.COMBINE_BACKWARD: "combine_backward_wait"}


def launches(spec: Any, op: Op, tokens: int, *, network: bool = False, clients: int = 0) -> dict[str, int]:
    """Return the blocks of each launch of an op, for at most 40 blocks."""
    engine: Any = object.__new__(CudaEngine)
    engine.spec, engine._network = spec, object() if network else None
    engine._launcher = SimpleNamespace(max_blocks=40, num_clients=clients)
    arguments: Any = SimpleNamespace(num_tokens=tokens)
    queued = engine._launches(op, arguments)
    assert all(1 <= blocks <= 40 for _, blocks in queued)
    assert len(dict(queued)) == len(queued)
    return dict(queued)


@pytest.mark.parametrize("op", WAITS, ids=lambda op: op.name)
def test_edges_of_the_number_of_blocks(op: Op) -> None:
    spec = make_spec(2, num_max_tokens_per_rank=3000)
    apart = spec.tuning.wait_apart_tokens
    for tokens in (0, 1, 39, 40, 41, apart - 1, apart, apart + 1):
        found = launches(spec, op, tokens)
        names = list(found)
        assert names[0].endswith("_send")
        assert names[-1].endswith("_receive")
        assert (WAITS[op] in found) is (tokens >= apart)
        assert names[1:-1] == [WAITS[op]] * (tokens >= apart)
        assert found.get(WAITS[op], 1) == 1
        by_tokens, by_rows = max(1, min(tokens, 40)), 40
        if op is Op.DISPATCH:
            assert found[names[0]] >= max(2, min(1 + tokens, 40)), "one to route, and one for each token"
            assert found[names[-1]] == by_rows
        elif op is Op.COMBINE:
            assert (found[names[0]], found[names[-1]]) == (by_rows, by_tokens)
        else:
            assert (found[names[0]], found[names[-1]]) == (by_tokens, by_rows)


@pytest.mark.parametrize("op", WAITS, ids=lambda op: op.name)
@pytest.mark.parametrize("clients", [0, 1, 50])
def test_launches_over_a_network_and_between_nodes(op: Op, clients: int) -> None:
    flat = replace(make_spec(2), num_max_tokens_per_rank=3000)
    assert (launches(flat, op, 9, network=True).get("dispatch_fetch") == 2) is (op is Op.DISPATCH)
    spec = replace(two_level(0, 1), num_max_tokens_per_rank=3000)
    apart = spec.tuning.wait_apart_tokens
    for tokens in (apart - 1, apart):
        found = launches(spec, op, tokens, network=True, clients=clients)
        assert "dispatch_fetch" not in found, "its proxy has fetched the lists"
        forwards = [name for name in found if name.endswith("_forward")]
        lists = [name for name in found if name.endswith(("_lists", "_first_wait"))]
        assert len(forwards) == bool(clients)
        assert len(lists) == (clients > 0 and (op is Op.DISPATCH or tokens >= apart))
        for name in lists:
            assert found[name] == (min(clients, 40) if op is Op.DISPATCH else 1)
            assert list(found).index(name) == list(found).index(forwards[0]) - 1 == 1


@pytest.mark.parametrize(
    ("num_ranks", "num_sms", "shared", "sending_part", "expected"),
    [(1, 12, True, 4, 12), (2, 12, False, 4, 12), (2, 12, True, 4, 4), (3, 12, True, 4, 3), (2, 3, True, 4, 1),
     (11, 12, True, 16, 1)],
)  # fmt: skip
def test_waits_that_share_a_gpu(num_ranks: int, num_sms: int, shared: bool, sending_part: int, expected: int) -> None:
    gpu: Any = SimpleNamespace(num_sms=num_sms)
    share = partial(blocks_of_a_wait, num_ranks, gpu, shared=shared, sending_part=sending_part)
    assert share(num_sms=None) == expected
    assert [share(num_sms=given) for given in range(1, expected + 1)] == list(range(1, expected + 1))
    for wrong in (0, expected + 1):
        with pytest.raises(InvalidConfig, match=f"num_sms: got {wrong}, expected 1 to {expected}"):
            share(num_sms=wrong)
