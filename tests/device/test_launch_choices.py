"""A rank launches the kernels of its heap and topology, and reaches its peers by the addresses of that heap."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.routing import make_spec

from moe_rt import _engine
from moe_rt.config.topology import Topology
from moe_rt.engine.gpu import launcher
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM
from moe_rt.errors import InvalidConfig
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
