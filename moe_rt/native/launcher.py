"""What every launch of a CUDA rank is given, packed once: its view of the group, its state, and how peers are reached.

The arguments' bytes are made by the C++ that reads them (moe_rt._engine); the fields filled in here are words.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig
from moe_rt.heap.segments import Segments
from moe_rt.native.gpu import Gpu

ELEMENT_NAMES = {torch.float32: "F32", torch.bfloat16: "Bf16", torch.float16: "F16", torch.float64: "F64"}
_CODEC_NAMES = {None: "kRaw", torch.float8_e4m3fn: "kFp8", torch.int8: "kInt8"}
THREADS = 512
NETWORK_THREADS = 256  # NVSHMEM's functions take registers of their own
_WARP = 32
# Control of cuda/device/exchange.h: state, record, timeout_ns, tag, may_overflow.
_CONTROL = struct.Struct("<QQqII")
_TAG_OFFSET = 24
# NetworkMemory of cuda/device/rdma.h: segment, outbox, staging, row_bytes; and room for how the network is called.
_LINKS = struct.Struct("<QQQqQ")
_MOST_WORDS = 9


def kernel_defines(spec: BufferSpec, threads: int = THREADS) -> dict[str, str | int]:
    """What the just-in-time compiler makes constant."""
    return {
        "MOE_RT_ELEM": ELEMENT_NAMES[spec.dtype],
        "MOE_RT_HIDDEN": spec.hidden,
        "MOE_RT_TOPK": spec.num_topk,
        "MOE_RT_THREADS": threads,
        "MOE_RT_DISPATCH_CODEC": _CODEC_NAMES[spec.dispatch_dtype],
        "MOE_RT_COMBINE_CODEC": _CODEC_NAMES[spec.combine_dtype],
    }


def network_bytes(spec: BufferSpec, max_blocks: int) -> int:
    """Symmetric memory that a rank with unmapped peers needs besides its segment."""
    return _engine.network_layout(spec.shape(), max_blocks * NETWORK_THREADS // _WARP)[3]


class Launcher:
    """Launches the kernels of one rank.

    Args:
        network: symmetric memory of `network_bytes`, where some peer's segment is not mapped.
        max_blocks: the most blocks of a launch that moves rows.

    Raises:
        InvalidConfig: more experts than a block's shared memory has room for.
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
    ) -> None:
        shape, placement = spec.shape(), list(spec.placement)
        self.max_blocks, self._threads = max_blocks, THREADS if network is None else NETWORK_THREADS
        self._shared_bytes = _engine.scratch_bytes(shape, placement, rank, self._threads)
        if self._shared_bytes > _engine.MAX_SCRATCH_BYTES:
            raise InvalidConfig(
                f"num_experts: got {spec.num_experts}, for which a block needs {self._shared_bytes} bytes of shared "
                f"memory, expected at most {_engine.MAX_SCRATCH_BYTES}"
            )
        links, mirror = [0] * 5, [0] * spec.num_ranks
        if network is not None:
            staging, mirrors, mirror_bytes, _, row_bytes = _engine.network_layout(
                shape, max_blocks * self._threads // _WARP
            )
            links = [segments.symmetric, network.symmetric, network.symmetric + staging, row_bytes, 0]
            mirror = [
                0 if address else network.symmetric + mirrors + peer * mirror_bytes
                for peer, address in enumerate(segments.addresses)
            ]
        capacity = [spec.capacity(r) for r in range(spec.num_ranks)]
        # The caller may have set another default device, or one without memory.
        tables = _engine.placement_tables(placement, spec.num_ranks)
        int32 = [torch.tensor(t, dtype=torch.int32, device="cpu") for t in tables]
        int64 = [torch.tensor(t, device="cpu") for t in (capacity, segments.addresses, mirror)]
        self.record = gpu.host_bytes(_engine.HOST_RECORD_BYTES)
        self._record_address = self.record.data_ptr()
        state = torch.frombuffer(bytearray(_engine.device_state()), dtype=torch.uint8)
        self.memory = [gpu.upload(t) for t in (state, *int32, *int64)]
        state_at, position, owner, rank_first, capacity_at, base, mirror_at = (t.data_ptr() for t in self.memory)
        world = _engine.world(
            shape=shape,
            rank=rank,
            config_hash=spec.hash(),
            position=position,
            owner=owner,
            rank_first=rank_first,
            capacity=capacity_at,
            base=base,
            mirror=mirror_at if network is not None else 0,
        )
        self._world = ctypes.create_string_buffer(world, len(world))
        self._control = ctypes.create_string_buffer(_CONTROL.size)
        may_overflow = spec.overflow == "raise" and spec.capacity_factor is not None
        _CONTROL.pack_into(self._control, 0, state_at, self._record_address, int(timeout_s * 1e9), 0, may_overflow)
        self._links = ctypes.create_string_buffer(_LINKS.pack(*links), _LINKS.size)
        self._args = ctypes.create_string_buffer(8 * _MOST_WORDS)
        arguments = (self._world, self._control, self._links, self._args)
        self._params = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        source = "kernels.cu" if network is None else "kernels_rdma.cu"
        self._kernels = gpu.kernels(source, kernel_defines(spec, self._threads), nvshmem=network is not None)

    def set_call(self, words: tuple[int, ...], tag: int) -> None:
        """The op's arguments, for the launches that follow."""
        struct.pack_into(f"<{len(words)}Q", self._args, 0, *words)
        struct.pack_into("<I", self._control, _TAG_OFFSET, tag)

    def launch(self, name: str, blocks: int, stream: int) -> None:
        """Queues a kernel."""
        self._kernels.launch(
            name,
            blocks=blocks,
            threads=self._threads,
            shared_bytes=self._shared_bytes,
            stream=stream,
            params=self._params,
        )

    def reported(self) -> _engine.Status | None:
        """The failure that a kernel has reported, without asking the device."""
        return _engine.reported(self._record_address)
