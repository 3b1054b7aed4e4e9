"""Launches the kernels of a CUDA rank. The arguments that all of them share are packed once.

They describe the group, this rank's state, and its links to peers. The structs are those of the C++ that reads them
(cuda/host/launch_bindings.cpp), and are filled by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from moe_rt import _engine
from moe_rt.config.codec import Codec
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig
from moe_rt.heap.segments import GinWindow, Segments
from moe_rt.native.dispatching import Args
from moe_rt.native.gpu import Gpu, Launches
from moe_rt.native.libraries import NCCL, NVSHMEM
from moe_rt.native.ring import RING_KERNELS, RING_SOURCE, ring_for

ELEMENT_NAMES: dict[torch.dtype, str] = {getattr(torch, name): device for name, device in _engine.elements()}
THREADS = 512
NETWORK_THREADS = 256  # the network library's functions also take registers
_WARP = 32


def kernel_defines(spec: BufferSpec, threads: int = THREADS) -> dict[str, str | int]:
    """Macros that the kernels are compiled with."""
    return {
        "MOE_RT_ELEM": ELEMENT_NAMES[spec.dtype],
        "MOE_RT_HIDDEN": spec.hidden,
        "MOE_RT_TOPK": spec.num_topk,
        "MOE_RT_THREADS": threads,
        "MOE_RT_DISPATCH_CODEC": Codec.of(spec.dispatch_dtype).enumerator,
        "MOE_RT_COMBINE_CODEC": Codec.of(spec.combine_dtype).enumerator,
    }


def network_bytes(spec: BufferSpec, max_blocks: int) -> int:
    """Symmetric memory that a rank with unmapped peers needs in addition to its segment, in bytes."""
    return _engine.NetworkLayout(spec.shape(), max_blocks * NETWORK_THREADS // _WARP).bytes


class Launcher:
    """Launches the kernels of one rank.

    Args:
        network: symmetric memory of `network_bytes`, if some peer's segment is not mapped or rows go in two levels.
            Without NVSHMEM, ranks of other nodes are reached through mapped memory.
        max_blocks: maximum blocks of a launch that moves rows.
        num_sms: the same number, if the caller has set it.

    Attributes:
        whole: True if the buffer is for so few tokens that a dispatch or a combine is one launch of one block.
        ring: memory that rows pass through unchanged; None if they pass through registers.
        num_served: number of remote ranks that this rank is the proxy of.

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
    ) -> None:
        shape, placement = spec.gpu_shape(), list(spec.placement.ranks)
        self.max_blocks, self._threads = max_blocks, THREADS if network is None else NETWORK_THREADS
        self.whole = network is None and spec.num_max_tokens_per_rank <= _engine.whole_tokens(shape)
        self._shared_bytes = _engine.scratch_bytes(shape, placement, rank, self._threads)
        if self._shared_bytes > _engine.MAX_SCRATCH_BYTES:
            raise InvalidConfig(
                f"num_experts: got {spec.num_experts}, for which a block needs {self._shared_bytes} bytes of shared "
                f"memory, expected at most {_engine.MAX_SCRATCH_BYTES}"
            )
        self.memory: list[torch.Tensor] = []

        def upload(values: Sequence[int], dtype: torch.dtype) -> int:
            # The caller may have set another default device, or one without memory.
            self.memory.append(gpu.upload(torch.tensor(values, dtype=dtype, device="cpu")))
            return self.memory[-1].data_ptr()

        links, mirror, nodes = _engine.Links(), [0] * spec.num_ranks, _engine.Nodes()
        base, rehearsed, self.num_served = list(segments.addresses), not segments.symmetric, 0
        if spec.node_of:
            here = spec.topology.node_of(rank)
            base = [a if node == here else 0 for a, node in zip(base, spec.node_of, strict=True)]
        if network is not None:
            layout = _engine.NetworkLayout(shape, max_blocks * self._threads // _WARP)
            memory = network.symmetric or network.addresses[rank]
            links = _engine.Links(
                segment=segments.symmetric or segments.addresses[rank],
                outbox=memory,
                staging=memory + layout.staging,
                warp_bytes=layout.warp_bytes,
                segments=upload(segments.addresses, torch.int64) if rehearsed else 0,
            )
            if segments.gin is not None:
                _go_over_gin(links, segments.gin, network.gin, shape.segment_bytes())
            mirror = [
                0 if address else memory + layout.mirrors + peer * layout.mirror_bytes
                for peer, address in enumerate(base)
            ]
        if spec.node_of:
            who = _engine.NodeTables(spec.node_of, rank)
            self.num_served = len(who.served)
            nodes = _engine.Nodes(
                own=here,
                num_served=self.num_served,
                node_of=upload(spec.node_of, torch.int32),
                forwarder=upload(who.forwarders, torch.int32),
                served_at=upload(who.served_at, torch.int32),
                served=upload(who.served, torch.int32),
                serving=upload(who.serving, torch.int32),
            )
            mirror = [
                0 if address else base[who.forwarders[peer]] + shape.staged_at(who.served_at[peer])
                for peer, address in enumerate(base)
            ]

        tables = _engine.PlacementTables(placement, spec.num_ranks)
        world = _engine.World(
            shape=shape,
            rank=rank,
            config_hash=spec.hash(),
            position=upload(tables.position, torch.int32),
            owner=upload(tables.owner, torch.int32),
            rank_first=upload(tables.rank_first, torch.int32),
            entries=upload(tables.entries, torch.int32),
            base=upload(base, torch.int64),
            mirror=upload(mirror, torch.int64) if network is not None else 0,
            nodes=nodes,
        )
        self.record = gpu.host_bytes(_engine.HOST_RECORD_BYTES)
        self._record_address = self.record.data_ptr()
        self._control = _engine.Control(
            state=upload(list(_engine.device_state()), torch.uint8),
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
        # Arguments of every kernel of cuda/device/entry_points.h; each call appends the op's own.
        self._given = (world, self._control, links if self.ring is None else self.ring)
        self._params = (ctypes.c_void_p * (len(self._given) + 1))(*(a.address for a in self._given))
        if network is None:
            source = RING_SOURCE if self.ring is not None else "kernels_whole.cu" if self.whole else "kernels.cu"
        elif spec.node_of:
            source = "kernels_nodes_mapped.cu" if rehearsed else "kernels_nodes.cu"
        else:
            source = "kernels_rdma.cu"
        library = None if network is None or rehearsed else NVSHMEM if segments.gin is None else NCCL
        if library is NCCL:
            source = source.replace("_rdma", "").replace(".cu", "_gin.cu")
        defines = kernel_defines(spec, self._threads)
        self._kernels = gpu.kernels(source, defines, library=library, own_shared=own_shared)

    def set_call(self, args: Args | _engine.EndArgs, tag: int) -> None:
        """Set the op's arguments for the launches that follow."""
        self._args = args  # keeps alive the bytes that a launch reads
        self._params[len(self._given)] = args.address
        self._control.tag = tag

    def launch(self, launches: Launches, stream: int) -> None:
        """Queue kernels, in order."""
        self._kernels.launch(
            launches,
            threads=self._threads,
            shared_bytes=self._shared_bytes,
            stream=stream,
            params=self._params,
        )

    def reported(self) -> _engine.Status | None:
        """Return the failure that a kernel has reported, without asking the device."""
        return _engine.reported(self._record_address)


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
