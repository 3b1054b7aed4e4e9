"""Opens the engine of a buffer, on the backend and heap that fit its group, and ends it when its rank leaves."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from moe_rt import _engine
from moe_rt.config.options import BufferOptions, HeapKind
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.engine.cpu import CpuEngine
from moe_rt.engine.cuda import CudaEngine, blocks_of_a_wait
from moe_rt.engine.engine import Engine
from moe_rt.engine.gpu.driver import Gpu
from moe_rt.engine.gpu.launcher import network_bytes
from moe_rt.errors import GroupPoisoned, InvalidConfig, MoeRtError, PeerDead, expect
from moe_rt.faults import Point, planned, reach
from moe_rt.group.all_or_none import agree, own_part
from moe_rt.group.processes import UNKNOWN, place
from moe_rt.group.rendezvous import Rendezvous, StoreRendezvous, ThreadGroup, all_gather_records
from moe_rt.memory.heaps import HEAPS, heaps_for
from moe_rt.memory.ucx import await_peers

_FOREVER_S = 1e9  # 31 years; a 64-bit clock of nanoseconds ends at 292
AnyEngine = TypeVar("AnyEngine", bound=Engine)


@dataclass(frozen=True)
class Backend:
    """Backend of a group. `gpu` is None for CPU ranks; for others a Gpu, or its stand-in.

    `anywhere` leaves it to `find_hosts` whether processes share the memory of one host. `hosts` is what that has found:
    the hosts of CPU ranks, or the groups of GPUs that map each other's memory. It is None before, and if GPUs form no
    such groups.
    """

    heap: HeapKind
    gpu: Gpu | None
    anywhere: bool = False
    hosts: Topology | None = None


def open_engine(
    rendezvous: StoreRendezvous | ThreadGroup, options: BufferOptions, sizes: dict[str, Any]
) -> tuple[BufferSpec, HeapKind, Engine]:
    """Check the options, agree on the spec with all ranks before memory is shared, allocate it, and make an engine.

    Collective, in one meeting: every rank succeeds or every rank raises.

    Args:
        sizes: the arguments of BufferSpec.make other than the topology and the options.

    Raises:
        InvalidConfig: a value was invalid, here or on a peer.
        ConfigMismatch, CorruptPeer, PeerTimeout, PeerDead, StoreLost: as `agree`. Also what a heap's allocate raises.
    """
    with own_part(rendezvous, "make its configuration"):
        backend = choose_backend(rendezvous, options.heap)
        fault = planned(rendezvous.rank, rendezvous.size, backend.gpu is None)
        reach(fault, Point.PRE_RENDEZVOUS)
        options.check_own()
        spec = BufferSpec.make(rendezvous.topology, options, **sizes)
    agree(rendezvous, spec.record(), options.init_timeout_s, "make its configuration")
    backend = find_hosts(backend, rendezvous, spec, options.init_timeout_s)
    spec = choose_route(spec, backend)
    if backend.gpu is None:
        return spec, backend.heap, _make_cpu_engine(backend, rendezvous, spec, options, fault)
    return spec, backend.heap, _make_cuda_engine(backend, backend.gpu, rendezvous, spec, options)


def choose_backend(rendezvous: StoreRendezvous | ThreadGroup, heap: HeapKind | Literal["auto"]) -> Backend:
    """Choose the backend for this kind of group.

    Threads share the CPU, or the CUDA device that their group names. Processes have a GPU each if their process group
    has an NCCL backend and torch sees a GPU; otherwise they share the memory of their hosts.

    Raises:
        InvalidConfig: `heap` does not fit the group, or the device does not exist.
    """
    if isinstance(rendezvous, ThreadGroup):
        processes, device = False, rendezvous.device
        on_cuda = not isinstance(device, str | torch.device) or torch.device(device).type == "cuda"
    else:
        processes, device = True, "cuda"
        on_cuda = torch.cuda.is_available() and _has_nccl(rendezvous)
    on_cpus, on_gpus = heaps_for(processes=processes, gpu=False), heaps_for(processes=processes, gpu=True)
    if heap == "auto" and not on_cuda:
        return Backend(on_cpus[0], None, anywhere=processes)
    if heap == "auto":
        heap = on_gpus[0]
    fitting = [*on_cpus, *on_gpus]
    if heap not in fitting:
        names = ", ".join(f'"{name}"' for name in fitting[:-1])
        raise InvalidConfig(f'heap: got "{heap}", expected "auto", {names} or "{fitting[-1]}" for this kind of group')
    if heap in on_cpus:
        return Backend(heap, None)
    if on_cuda and not isinstance(device, str | torch.device):
        return Backend(heap, device)
    return Backend(heap, Gpu(device if on_cuda else "cuda"))


def find_hosts(backend: Backend, rendezvous: Rendezvous, spec: BufferSpec, timeout_s: float) -> Backend:
    """Return the backend with the hosts of its ranks and, for CPU ranks, the heap that fits. Collective for processes.

    Raises:
        InvalidConfig: ranks ask for different heaps. Also what the heap's allocate raises.
    """
    traits = HEAPS[backend.heap]
    if traits.network and backend.gpu is not None and spec.route != "flat":
        mapped = {"mapped": traits.module.mapped(rendezvous, timeout_s, backend.gpu)}
        records = all_gather_records(rendezvous, mapped, timeout_s, "report which GPUs it maps")
        return replace(backend, hosts=_domains([r["mapped"] for r in records]))
    if traits.gpu or not traits.processes:
        return backend
    asked = {"heap": "auto" if backend.anywhere else backend.heap}
    records = all_gather_records(rendezvous, {**place(), **asked}, timeout_s, "choose a heap")
    named = {str(r.get("heap")) for r in records} - {"auto"}
    if len(named) > 1:
        raise InvalidConfig(f"heap: got {sorted(named)} on different ranks, expected one", rank=rendezvous.rank)
    places = [str(r.get("where")) for r in records]
    several = sum(not where.startswith(UNKNOWN) for where in set(places)) > 1
    fitting = heaps_for(processes=True, gpu=False)
    over_network = any(HEAPS[name].network for name in fitting if name in named) or (several and not named)
    heap = next(name for name in fitting if HEAPS[name].network is over_network)
    return replace(backend, heap=heap, anywhere=False, hosts=Topology.of_places(places))


def choose_route(spec: BufferSpec, backend: Backend) -> BufferSpec:
    """Return the spec with its route and its nodes: those of the group, or else the hosts of its ranks.

    Raises:
        InvalidConfig: on every rank, if two levels are requested between nodes that are not the hosts, or whose GPUs do
            not map each other.
    """
    asked = spec.route == "two_level"
    if not HEAPS[backend.heap].network:  # memory is mapped: nodes are a rehearsal, on request
        return replace(spec, route="two_level" if asked and spec.topology.num_nodes > 1 else "flat")
    hosts = backend.hosts
    if spec.route == "flat" or hosts is None:
        expect(not asked, "route", spec.route, '"auto" or "flat" for GPUs that do not map each other node by node')
        return replace(spec, route="flat")
    topology = spec.topology if spec.topology.num_nodes > 1 else hosts
    fits = topology.divides_as(hosts)
    if asked and backend.gpu is not None:  # networks reach mapped GPUs as they reach others: a rehearsal
        expected = f"nodes whose GPUs map each other, as those of {hosts} do"
        expect(topology.is_inside(hosts), "route", f'"two_level" with nodes {topology}', expected)
    elif asked:
        expect(fits, "route", f'"two_level" with nodes {topology}', f"nodes that are hosts, {hosts}")
    # Two levels of one rank per node move the same bytes.
    gains = topology.num_nodes > 1 if asked or backend.gpu is not None else topology.shares_nodes
    two_level = (asked or fits) and gains
    return replace(spec, route="two_level" if two_level else "flat", topology=topology)


def _make_cpu_engine(
    backend: Backend, rendezvous: Rendezvous, spec: BufferSpec, options: BufferOptions, fault: _engine.Fault
) -> CpuEngine:
    traits, shape, init_timeout_s = HEAPS[backend.heap], spec.shape(), options.init_timeout_s
    size = shape if traits.network else shape.segment_bytes()
    segments = traits.module.allocate(rendezvous, size, init_timeout_s)

    def make() -> CpuEngine:
        return CpuEngine(
            spec,
            rendezvous.rank,
            segments,
            timeout_s=min(options.timeout_s, _FOREVER_S),
            num_threads=options.num_threads,
            isa=os.environ.get("MOE_RT_ISA", "auto"),
            fault=fault,
        )

    with ExitStack() as on_error:
        on_error.callback(segments.release)
        engine = _make_all_or_none(rendezvous, make, init_timeout_s)
        on_error.pop_all()
    engine.reach(Point.POST_RENDEZVOUS)
    return engine


def _make_cuda_engine(
    backend: Backend, gpu: Gpu, rendezvous: Rendezvous, spec: BufferSpec, options: BufferOptions
) -> CudaEngine:
    allocate, shape, init_timeout_s = HEAPS[backend.heap].module.allocate, spec.gpu_shape(), options.init_timeout_s
    with ExitStack() as on_error:  # the error keeps this frame and its objects alive
        segments = allocate(rendezvous, shape.segment_bytes(), init_timeout_s, gpu)
        on_error.callback(segments.release)
        segments.marks.extend(_engine.closed_marks(shape, rendezvous.rank))
        with own_part(rendezvous, "use its GPU"):
            if spec.overflow == "retry":
                raise InvalidConfig(
                    'overflow: got "retry" on CUDA, where the host sees no overflow; expected "raise" or "drop"'
                )
            shared, sending_part = segments.streams is not None, spec.tuning.sending_part
            num_waits = spec.num_ranks * spec.depth  # each may be on a stream of its own
            blocks = blocks_of_a_wait(num_waits, gpu, options.num_sms, shared=shared, sending_part=sending_part)
        own = {"blocks": blocks, "unmapped": 0 in segments.addresses}
        seen = all_gather_records(rendezvous, own, init_timeout_s, "use its GPU")
        network = None
        over_network = bool(spec.node_of) or any(r["unmapped"] for r in seen)
        allowed = "1 for GPUs in two levels, or that do not all map each other"
        expect(spec.depth == 1 or not over_network, "depth", spec.depth, allowed)
        if over_network:
            most = max(r["blocks"] for r in seen)  # symmetric memory has one size on every rank
            network = allocate(rendezvous, network_bytes(spec, most), init_timeout_s, gpu)
            on_error.callback(network.release)

        def make() -> CudaEngine:
            return CudaEngine(
                spec,
                rendezvous.rank,
                segments,
                gpu,
                network=network,
                timeout_s=min(options.timeout_s, _FOREVER_S),
                max_blocks=blocks,
                num_sms=options.num_sms,
            )

        engine = _make_all_or_none(rendezvous, make, init_timeout_s)
        on_error.pop_all()
    return engine


def _make_all_or_none(rendezvous: Rendezvous, make: Callable[[], AnyEngine], timeout_s: float) -> AnyEngine:
    """Return the engine from `make` once every rank has one, so that no rank has a buffer that a peer never joins."""
    engine: AnyEngine | None = None
    try:
        with own_part(rendezvous, "make its engine"):
            engine = make()
        all_gather_records(rendezvous, {}, timeout_s, "make its engine")
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    return engine


def _domains(mapped: list[list[bool]]) -> Topology | None:
    """Return the groups of GPUs that map each other and no others, or None. mapped[r] marks the GPUs that r maps."""
    seen = [tuple(peer for peer, is_mapped in enumerate(row) if is_mapped) for row in mapped]
    are_groups = all(seen[peer] == group for group in seen for peer in group)
    return Topology.of_places([str(group) for group in seen]) if are_groups else None


def _has_nccl(rendezvous: StoreRendezvous) -> bool:
    try:
        return str(rendezvous.group._get_backend(torch.device("cuda")).name()) == "nccl"
    except RuntimeError:  # no backend for CUDA
        return False


def leave(engine: Engine) -> None:
    """Close a buffer that is garbage, or still open when the program ends. An exception that ends it ends the group."""
    here = threading.current_thread()
    ends = here is threading.main_thread() and not here.is_alive()  # true while exit handlers run
    error = getattr(sys, "last_value", None) if ends and not hasattr(sys, "ps1") else None
    if error is not None:  # not one shown at a prompt, where the program continued
        engine.poison(error)
    engine.close("its program ended" if ends else "its buffer became garbage")
    if ends:
        await_peers()


def first_failure(engine: Engine, error: BaseException) -> MoeRtError | None:
    """Return the error with which a peer ended the group, if `error` may only be its consequence.

    torch's collectives fail with such an error when a peer is dead, and cannot say what happened to it.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return None
    try:
        engine.health()
    except (GroupPoisoned, PeerDead) as first:
        return first
    except MoeRtError:
        pass
    return None
