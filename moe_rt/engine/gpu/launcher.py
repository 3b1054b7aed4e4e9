"""Launches the kernels of a CUDA rank. The arguments that all of them share are packed once.

They describe the group, this rank's state, and its links to peers. The structs are those of the C++ that reads them
(cuda/python/launch_bindings.cpp), and are filled by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from moe_rt import _engine
from moe_rt.config.codec import Codec
from moe_rt.config.options import Sums
from moe_rt.config.spec import BufferSpec
from moe_rt.engine.gpu.driver import Gpu, Kernels, Launches
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM, Library
from moe_rt.engine.halves import Args
from moe_rt.errors import InvalidConfig
from moe_rt.memory.segments import GinWindow, Segments

ELEMENT_NAMES: dict[torch.dtype, str] = {getattr(torch, name): device for name, device in _engine.elements()}
_WARP = 32

# Rings in shared memory, which rows pass through if an op is given few multiprocessors (cuda/gpu/moving.h).
RING_SOURCE = "kernels_ring.cu"
# Kernels that move rows as they are.
RING_KERNELS = ("dispatch_send", "dispatch_receive", "combine_backward_send")
_UNIT = 16  # a bulk copy moves a multiple of this, in bytes


SUMS_ENUMERATORS: dict[Sums, str] = {"ranked": "kRanked", "invariant": "kInvariant"}


def kernel_defines(spec: BufferSpec, threads: int) -> dict[str, str | int]:
    """Macros that the kernels are compiled with."""
    return {
        "MOE_RT_ELEM": ELEMENT_NAMES[spec.dtype],
        "MOE_RT_HIDDEN": spec.hidden,
        "MOE_RT_TOPK": spec.num_topk,
        "MOE_RT_THREADS": threads,
        "MOE_RT_DISPATCH_CODEC": Codec.of(spec.dispatch_dtype).enumerator,
        "MOE_RT_COMBINE_CODEC": Codec.of(spec.combine_dtype).enumerator,
        "MOE_RT_SUMS": SUMS_ENUMERATORS[spec.sums],
    }


def network_bytes(spec: BufferSpec, max_blocks: int) -> int:
    """Symmetric memory that a rank with unmapped peers needs in addition to its segment, in bytes."""
    return _engine.NetworkLayout(spec.shape(), max_blocks * spec.tuning.network_threads // _WARP).bytes


class Launcher:
    """Launches the kernels of one rank in one channel, whose state they keep.

    Args:
        channel: the channel, below the buffer's depth.
        plan_mark: identifies the rank's engine in its plans.
        network: symmetric memory of `network_bytes`, if some peer's segment is not mapped or rows go in two levels.
            Without NVSHMEM, ranks of other nodes are reached through mapped memory.
        max_blocks: maximum blocks of a launch that moves rows.
        num_sms: the same number, if the caller has set it.

    Attributes:
        whole: True if the buffer is for so few tokens that a dispatch or a combine is one launch of one block.
        ring: memory that rows pass through unchanged; None if they pass through registers.
        num_clients: number of remote ranks that this rank is the proxy of.
        windows: the device's turns of windows. They hold only while it runs exactly the ops that the host queues.

    Raises:
        InvalidConfig: more experts than fit into a block's shared memory.
        CompileError: a kernel could not be compiled.
    """

    def __init__(
        self,
        spec: BufferSpec,
        rank: int,
        segments: Segments,
        network: Segments | None,
        gpu: Gpu,
        *,
        timeout_s: float,
        max_blocks: int,
        num_sms: int | None,
        channel: int,
        plan_mark: int,
    ) -> None:
        self.max_blocks, self.channel, self.windows = max_blocks, channel, _engine.WindowSelector()
        self._threads = spec.tuning.threads if network is None else spec.tuning.network_threads
        self.whole = network is None and spec.num_max_tokens_per_rank <= _engine.whole_tokens(spec.gpu_shape())
        self._shared_bytes = _shared_bytes(spec, rank, self._threads)
        self._gpu, self.memory, self.num_clients = gpu, list[torch.Tensor](), 0
        base, mirror = _loadable(spec, rank, segments), [0] * spec.num_ranks
        links, nodes = _engine.Links(), _engine.Nodes()
        if network is not None:
            links, mirror = self._reach(spec, rank, segments, network, base)
        if spec.node_of:
            nodes, mirror = self._join_nodes(spec, rank, base)
        world = self._world(spec, rank, nodes, base, mirror if network is not None else None, plan_mark)
        self.record = gpu.host_bytes(_engine.HOST_RECORD_BYTES)
        self._record_address = self.record.data_ptr()
        self._control = _engine.Control(
            state=self._upload(list(_engine.device_state()), torch.uint8),
            record=self._record_address,
            timeout_ns=int(timeout_s * 1e9),
            tag=0,
            may_overflow=spec.overflow == "raise" and spec.capacity_factor is not None,
        )
        self.ring: _engine.RingMemory | None = None
        own_shared: dict[str, int] = {}
        if network is None and not self.whole:
            warps, scratch_bytes = self._threads // _WARP, self._shared_bytes
            self.ring = ring_for(spec, num_sms, scratch_bytes=scratch_bytes, bulk_bytes=gpu.bulk_bytes, warps=warps)
        if self.ring is not None:
            own_shared = dict.fromkeys(RING_KERNELS, self.ring.at + self._threads // _WARP * self.ring.bytes)
        # Arguments of every kernel of cuda/gpu/entry_points.h; each call appends the op's own.
        self._given = (world, self._control, links if self.ring is None else self.ring)
        self._params = (ctypes.c_void_p * (len(self._given) + 1))(*(a.address for a in self._given))
        if network is None:
            source = RING_SOURCE if self.ring is not None else "kernels_whole.cu" if self.whole else "kernels.cu"
            library = None
        else:
            source, library = _over_network(spec, segments)
        self._defines = kernel_defines(spec, self._threads)
        self._kernels = gpu.kernels(source, self._defines, library=library, own_shared=own_shared)
        self._halves: Kernels | None = None if self.whole else self._kernels

    def _upload(self, values: Sequence[int], dtype: torch.dtype) -> int:
        """Copy a table to the GPU, where it stays as long as this object, and return its address."""
        # The caller may have set another default device, or one without memory.
        self.memory.append(self._gpu.upload(torch.tensor(values, dtype=dtype, device="cpu")))
        return self.memory[-1].data_ptr()

    def _reach(
        self, spec: BufferSpec, rank: int, segments: Segments, network: Segments, base: list[int]
    ) -> tuple[_engine.Links, list[int]]:
        """Return the links to unmapped peers, and the address of the copy of each one's route lists."""
        shape = spec.gpu_shape()
        layout = _engine.NetworkLayout(shape, self.max_blocks * self._threads // _WARP)
        memory = network.symmetric or network.addresses[rank]
        links = _engine.Links(
            segment=segments.symmetric or segments.addresses[rank],
            outbox=memory,
            staging=memory + layout.staging,
            warp_bytes=layout.warp_bytes,
            segments=0 if segments.symmetric else self._upload(segments.addresses, torch.int64),
        )
        if segments.gin is not None:
            _go_over_gin(links, segments.gin, network.gin, shape.segment_bytes())
        mirrors = memory + layout.mirrors
        return links, [0 if at else mirrors + peer * layout.mirror_bytes for peer, at in enumerate(base)]

    def _join_nodes(self, spec: BufferSpec, rank: int, base: list[int]) -> tuple[_engine.Nodes, list[int]]:
        """Return the tables of nodes and proxies, and where proxies stage the route lists of remote ranks."""
        shape, who = spec.gpu_shape(), _engine.NodeTables(spec.node_of, rank)
        self.num_clients = len(who.clients)
        nodes = _engine.Nodes(
            own=spec.topology.node_of(rank),
            num_clients=self.num_clients,
            node_of=self._upload(spec.node_of, torch.int32),
            proxy_of=self._upload(who.proxies, torch.int32),
            client_index=self._upload(who.client_index, torch.int32),
            clients=self._upload(who.clients, torch.int32),
            proxy_on=self._upload(who.proxy_on, torch.int32),
        )
        staged = [
            0 if at else base[who.proxies[peer]] + shape.staged_at(who.client_index[peer])
            for peer, at in enumerate(base)
        ]
        return nodes, staged

    def _world(
        self, spec: BufferSpec, rank: int, nodes: _engine.Nodes, base: list[int], mirror: list[int] | None,
        plan_mark: int,
    ) -> _engine.World:  # fmt: skip
        """Return the group as kernels see it: sizes, placement, and the address of each peer's segment or mirror."""
        tables = _engine.PlacementTables(list(spec.placement.ranks), spec.num_ranks)
        return _engine.World(
            shape=spec.gpu_shape(),
            channel=self.channel,
            rank=rank,
            config_hash=spec.hash(),
            position=self._upload(tables.position, torch.int32),
            owner=self._upload(tables.owner, torch.int32),
            rank_first=self._upload(tables.rank_first, torch.int32),
            entries=self._upload(tables.entries, torch.int32),
            base=self._upload(base, torch.int64),
            mirror=0 if mirror is None else self._upload(mirror, torch.int64),
            nodes=nodes,
            plan_mark=plan_mark,
        )

    def set_call(self, args: Args | _engine.EndArgs, tag: int) -> None:
        """Set the op's arguments for the launches that follow."""
        self._args = args  # keeps alive the bytes that a launch reads
        self._params[len(self._given)] = args.address
        self._control.tag = tag

    def launch(self, launches: Launches, stream: int) -> None:
        """Queue kernels, in order."""
        self._launch(self._kernels, launches, stream)

    def launch_half(self, launches: Launches, stream: int) -> None:
        """Queue the kernels of half an op. A buffer for very few tokens compiles them on first use."""
        if self._halves is None:
            self._halves = self._gpu.kernels("kernels.cu", self._defines)
        self._launch(self._halves, launches, stream)

    def _launch(self, kernels: Kernels, launches: Launches, stream: int) -> None:
        kernels.launch(
            launches,
            threads=self._threads,
            shared_bytes=self._shared_bytes,
            stream=stream,
            params=self._params,
        )

    def reported(self) -> _engine.Status | None:
        """Return the failure that a kernel has reported, without asking the device."""
        return _engine.reported(self._record_address)


def _shared_bytes(spec: BufferSpec, rank: int, threads: int) -> int:
    """Return the shared memory of a block, without rings. Raise InvalidConfig if it exceeds the limit."""
    num_bytes = _engine.scratch_bytes(spec.gpu_shape(), list(spec.placement.ranks), rank, threads)
    if num_bytes > _engine.MAX_SCRATCH_BYTES:
        raise InvalidConfig(
            f"num_experts: got {spec.num_experts}, for which a block needs {num_bytes} bytes of shared "
            f"memory, expected at most {_engine.MAX_SCRATCH_BYTES}"
        )
    return num_bytes


def _loadable(spec: BufferSpec, rank: int, segments: Segments) -> list[int]:
    """Return the addresses of segments that kernels load from and store to; 0 for peers reached in another way."""
    if not spec.node_of:
        return list(segments.addresses)
    here = spec.topology.node_of(rank)
    return [a if node == here else 0 for a, node in zip(segments.addresses, spec.node_of, strict=True)]


def _over_network(spec: BufferSpec, segments: Segments) -> tuple[str, Library | None]:
    """Return the source of the kernels that reach unmapped or remote peers, and the library to link them with."""
    if not segments.symmetric:  # a rehearsal of nodes, through mapped memory
        return "kernels_nodes_mapped.cu" if spec.node_of else "kernels_rdma.cu", None
    if segments.gin is not None:
        return "kernels_nodes_gin.cu" if spec.node_of else "kernels_gin.cu", NCCL
    return "kernels_nodes.cu" if spec.node_of else "kernels_rdma.cu", NVSHMEM


def _go_over_gin(links: _engine.Links, segment: GinWindow, memory: GinWindow | None, segment_bytes: int) -> None:
    if not segment.communicator or memory is None:
        expected = "one that connects all GPUs, for rows in two levels; NCCL_DEBUG=INFO says why there is none"
        raise InvalidConfig(f'heap "gin": got no network of NCCL\'s, expected {expected}')
    links.over_gin(
        communicator=segment.communicator,
        segment_window=segment.window,
        memory_window=memory.window,
        segment_bytes=segment_bytes,
    )


def ring_for(
    spec: BufferSpec, num_sms: int | None, *, scratch_bytes: int, bulk_bytes: int, warps: int
) -> _engine.RingMemory | None:
    """Return the rings of a block's warps, or None if rows go through registers.

    Args:
        num_sms: multiprocessors that the caller gives an op, if any.
        scratch_bytes: shared memory of a block that is in use.
        bulk_bytes: shared memory that a block may have; 0 without bulk copies.
    """
    if num_sms is None or num_sms > spec.tuning.ring_blocks:
        return None
    if bulk_bytes == 0 or spec.hidden * spec.dtype.itemsize % _UNIT:
        return None
    ring = _engine.RingMemory(scratch_bytes=scratch_bytes, block_bytes=bulk_bytes, warps=warps, num_topk=spec.num_topk)
    return ring if under_way(ring, warps) > spec.tuning.ring_bytes else None


def under_way(ring: _engine.RingMemory, warps: int) -> int:
    """Maximum bytes of rows in flight into a block's shared memory."""
    return warps * _engine.RING_LOADS * ring.piece
