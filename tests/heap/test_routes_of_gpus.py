"""The route of GPUs: two levels if NVSHMEM maps them in groups, one if it maps all, or not in groups."""

from __future__ import annotations

from typing import Any

import pytest
from heap.nvshmem_job import TIMEOUT_S, Job
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.routing import buffer_kwargs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.config.topology import Topology
from moe_rt.engine import backend
from moe_rt.engine.backend import Backend, choose_route, find_hosts
from moe_rt.errors import InvalidConfig
from moe_rt.memory import nvshmem

IN_PAIRS = [[rank // 2 == peer // 2 for peer in range(4)] for rank in range(4)]
IN_A_RING = [[(rank - peer) % 4 != 2 for peer in range(4)] for rank in range(4)]
ONE_SIDED = [[True, True], [False, True]]


@pytest.mark.parametrize(
    ("mapped", "nodes"),
    [(IN_PAIRS, (0, 0, 1, 1)), ([[True] * 3] * 3, (0, 0, 0)), (IN_A_RING, None), (ONE_SIDED, None)],
)
def test_groups_of_gpus_that_map_each_other(mapped: list[list[bool]], nodes: tuple[int, ...] | None) -> None:
    found = backend._domains(mapped)
    assert (found and found.nodes) == nodes


def chosen(route: str, told: tuple[int, ...], hosts: tuple[int, ...] | None) -> tuple[str, tuple[int, ...]]:
    """Return the route and the nodes that a spec gets."""
    spec = make_spec(4, route=route)
    found = Backend("nvshmem", EmulatedGpu(), hosts=None if hosts is None else Topology(hosts))  # type: ignore[arg-type]
    made = choose_route(backend.replace(spec, topology=Topology(told)), found)
    return str(made.route), made.topology.nodes


ALL, PAIRS, EACH = (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)


def test_auto_takes_two_levels_where_some_gpus_are_not_mapped() -> None:
    assert chosen("auto", ALL, PAIRS) == ("two_level", PAIRS)
    assert chosen("auto", PAIRS, PAIRS) == ("two_level", PAIRS)
    assert chosen("auto", ALL, ALL) == ("flat", ALL)
    assert chosen("auto", PAIRS, ALL) == ("flat", PAIRS), "nodes in name alone are for who asks for them"
    assert chosen("auto", EACH, PAIRS)[0] == "flat"
    assert chosen("auto", ALL, None) == ("flat", ALL)
    assert chosen("flat", ALL, PAIRS)[0] == "flat"


def test_two_levels_need_nodes_whose_gpus_map_each_other() -> None:
    assert chosen("two_level", ALL, PAIRS) == ("two_level", PAIRS)
    assert chosen("two_level", PAIRS, ALL) == ("two_level", PAIRS), "a rehearsal on one host"
    assert chosen("two_level", EACH, PAIRS) == ("two_level", EACH)
    assert chosen("two_level", ALL, ALL)[0] == "flat", "one node has one level"
    with pytest.raises(InvalidConfig, match=r"nodes Topology\(\[\[0, 2\], \[1, 3\]\]\), expected nodes whose GPUs map"):
        chosen("two_level", (0, 1, 0, 1), PAIRS)
    with pytest.raises(InvalidConfig, match='got two_level, expected "auto" or "flat" for GPUs that do not map'):
        chosen("two_level", ALL, None)


def test_ranks_tell_each_other_whom_they_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange which peers they map; with a flat route they exchange nothing."""
    monkeypatch.setattr(nvshmem, "mapped", lambda rendezvous, *_: IN_PAIRS[rendezvous.rank])

    def find(group: ThreadGroup, route: str) -> Any:
        found = find_hosts(Backend("nvshmem", EmulatedGpu()), group, make_spec(4, route=route), 60.0)  # type: ignore[arg-type]
        return found.hosts

    assert ThreadRanks(4).run(find, "auto") == [Topology(PAIRS)] * 4
    assert ThreadRanks(4).run(find, "flat") == [None] * 4


def test_who_is_mapped_is_seen_from_a_segment_that_is_used_again() -> None:
    job = Job(3)
    job.cores[0].unmapped, job.cores[1].unmapped, job.cores[2].unmapped = {2}, {2}, {0, 1}

    def mapped(group: ThreadGroup) -> list[bool]:
        return job.worlds[group.rank].mapped(group, TIMEOUT_S, job.gpus[group.rank])

    first = ThreadRanks(3).run(mapped)
    assert first == [[True, True, False], [True, True, False], [False, False, True]]
    made = len(job.cluster.of("buffer"))
    assert ThreadRanks(3).run(mapped) == first
    assert len(job.cluster.of("buffer")) == made


def test_virtual_ranks_take_two_levels_where_they_are_asked_to() -> None:
    def make(group: ThreadGroup) -> list[str]:
        routes = []
        for route in ("auto", "flat", "two_level"):
            with Buffer(group, **{**buffer_kwargs(make_spec(2)), "route": route}) as buffer:
                routes.append(buffer.route)
        return routes

    assert ThreadRanks(2, EmulatedGpu(), nodes=(0, 1)).run(make) == [["flat", "flat", "two_level"]] * 2


def test_two_levels_push_nothing() -> None:
    """Two levels push nothing and reserve no space for it."""
    spec = backend.replace(make_spec(4, route="two_level"), topology=Topology(PAIRS))
    assert spec.gpu_shape().segment_bytes() == spec.shape().segment_bytes()
    flat = make_spec(4)
    assert flat.gpu_shape().segment_bytes() == flat.shape(pushes=True).segment_bytes()


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("nccl", [True, False])
def test_processes_have_gpus_if_there_are_any_and_nccl_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, gpus: bool, nccl: bool
) -> None:
    monkeypatch.setattr(backend.torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(backend, "_has_nccl", lambda rendezvous: nccl)
    monkeypatch.setattr(backend, "Gpu", lambda device: f"the GPU of {device}")
    found = backend.choose_backend(None, "auto")  # type: ignore[arg-type]
    expected = ("nvshmem", "the GPU of cuda", False) if gpus and nccl else ("shm", None, True)
    assert (found.heap, found.gpu, found.anywhere) == expected


@pytest.mark.parametrize(
    ("inner", "outer", "inside"),
    [
        ((0, 0, 1, 1), (0, 0, 1, 1), True),
        ((0, 0, 1, 1), (1, 1, 0, 0), True),
        ((0, 0, 1, 1), (0, 0, 0, 0), True),
        ((0, 0, 0, 0), (0, 0, 1, 1), False),
        ((0, 0, 1, 1), (0, 0, 1, 2), False),
        ((0, 1, 1, 0), (0, 0, 1, 1), False),
        ((0, 1, 2, 3), (0, 0, 1, 1), True),
    ],
    ids=str,
)
def test_nodes_inside_others(inner: tuple[int, ...], outer: tuple[int, ...], inside: bool) -> None:
    assert Topology(inner).is_inside(Topology(outer)) is inside
