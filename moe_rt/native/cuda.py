"""The CUDA engine for tensors: two launches an op on torch's current stream, and never a look at the device.

What goes wrong on the device is reported to page-locked host memory and raised at the next op or check. By then this
rank may have queued ops that its peers have not, so on CUDA every error ends the group.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.config import BufferSpec
from moe_rt.errors import (
    Code,
    ConcurrentUse,
    GroupClosed,
    GroupPoisoned,
    InvalidConfig,
    MoeRtError,
    Op,
    error_from_status,
)
from moe_rt.heap.segments import Segments
from moe_rt.native.engine import REFUSAL_CODES, Engine
from moe_rt.native.gpu import Gpu

THREADS = 512
ELEMENT_NAMES = {torch.float32: "F32", torch.bfloat16: "Bf16", torch.float16: "F16", torch.float64: "F64"}


class _Launches(NamedTuple):
    """The two launches of an op, and what each works through: this rank's tokens, or the rows it received."""

    send: str
    receive: str
    num_tokens: int  # which word says how many tokens
    sends_received: bool


_COMBINE = _Launches("combine_send", "combine_receive", 6, True)
_LAUNCHES = {
    Op.DISPATCH: _Launches("dispatch_send", "dispatch_receive", 3, False),
    Op.COMBINE: _COMBINE,
    Op.DISPATCH_BACKWARD: _COMBINE,
    Op.COMBINE_BACKWARD: _Launches("combine_backward_send", "combine_backward_receive", 1, False),
}
# Control of cuda/device/exchange.h: state, record, timeout_ns, tag, may_overflow.
_CONTROL = struct.Struct("<QQqII")
_TAG_OFFSET = 24
_VECTOR_BYTES = 16


def kernel_defines(spec: BufferSpec) -> dict[str, str | int]:
    """What the just-in-time compiler makes constant."""
    return {
        "MOE_RT_ELEM": ELEMENT_NAMES[spec.dtype],
        "MOE_RT_HIDDEN": spec.hidden,
        "MOE_RT_TOPK": spec.num_topk,
        "MOE_RT_THREADS": THREADS,
    }


class CudaEngine(Engine):
    """A rank that is a GPU, or shares one with others.

    Args:
        num_sms: blocks of a launch that waits, at most one for each multiprocessor; None for what the heap allows.

    Raises:
        InvalidConfig: the GPU has no room for so many virtual ranks or experts.
        CompileError: a kernel could not be compiled.
    """

    def __init__(
        self, spec: BufferSpec, rank: int, segments: Segments, gpu: Gpu, *, timeout_s: float, num_sms: int | None
    ) -> None:
        super().__init__(spec, rank, gpu.device, timeout_s)
        self._segments, self._gpu = segments, gpu
        self._max_blocks = _blocks_of_a_wait(spec, segments, gpu, num_sms)
        shape, placement = spec.shape(), list(spec.placement)
        self._shared_bytes = _engine.scratch_bytes(shape, placement, rank, THREADS)
        if self._shared_bytes > _engine.MAX_SCRATCH_BYTES:
            raise InvalidConfig(
                f"num_experts: got {spec.num_experts}, which takes {self._shared_bytes} bytes of shared memory a block, "
                f"expected at most {_engine.MAX_SCRATCH_BYTES}"
            )
        int32 = [torch.tensor(t, dtype=torch.int32) for t in _engine.placement_tables(placement, spec.num_ranks)]
        capacity = [spec.capacity(r) for r in range(spec.num_ranks)]
        int64 = [torch.tensor(capacity), torch.tensor(segments.addresses)]
        self._record = gpu.host_bytes(_engine.HOST_RECORD_BYTES)
        self._record_address = self._record.data_ptr()
        state = torch.frombuffer(bytearray(_engine.device_state()), dtype=torch.uint8)
        self._memory = [gpu.upload(t) for t in (state, *int32, *int64)]
        state_at, position, owner, rank_first, capacity_at, base = (t.data_ptr() for t in self._memory)
        world = _engine.world(
            shape=shape,
            rank=rank,
            config_hash=spec.hash(),
            position=position,
            owner=owner,
            rank_first=rank_first,
            capacity=capacity_at,
            base=base,
            mirror=0,
        )
        may_overflow = spec.overflow == "raise" and spec.capacity_factor is not None
        self._world = ctypes.create_string_buffer(world, len(world))
        self._control = ctypes.create_string_buffer(_CONTROL.size)
        _CONTROL.pack_into(self._control, 0, state_at, self._record_address, int(timeout_s * 1e9), 0, may_overflow)
        self._links = ctypes.create_string_buffer(8)
        self._args = ctypes.create_string_buffer(8 * 9)
        arguments = (self._world, self._control, self._links, self._args)
        self._params = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self._kernels = gpu.kernels("kernels.cu", kernel_defines(spec))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ended: MoeRtError | None = None
        self._closed = False

    def _rows(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self.spec.dtype, device=self.device)

    def _input(self, t: Tensor) -> Tensor:
        t = t.contiguous()
        # A view may start anywhere; kernels load whole vectors.
        return t if t.data_ptr() % _VECTOR_BYTES == 0 else t.clone()

    def _run(self, op: Op, words: tuple[int, ...], tag: int) -> None:
        launches = _LAUNCHES[op]
        tokens, received = words[launches.num_tokens], self.spec.num_ranks * self.spec.num_max_tokens_per_rank
        before, after = (received, tokens) if launches.sends_received else (tokens, received)
        routing = self.spec.num_ranks if op is Op.DISPATCH else 0
        with self._exclusive(op):
            self.health()
            stream = self._stream()
            struct.pack_into(f"<{len(words)}Q", self._args, 0, *words)
            struct.pack_into("<I", self._control, _TAG_OFFSET, tag)
            self._launch(launches.send, routing + self._blocks(before), stream)
            self._launch(launches.receive, self._blocks(after), stream)

    def _blocks(self, num_rows: int) -> int:
        return max(1, min(self._max_blocks, num_rows))

    def _launch(self, name: str, blocks: int, stream: int) -> None:
        self._kernels.launch(
            name, blocks=blocks, threads=THREADS, shared_bytes=self._shared_bytes, stream=stream, params=self._params
        )

    def _stream(self) -> int:
        """The current stream; virtual ranks of one GPU must not share one: each would wait behind its peer's wait."""
        stream = self._gpu.stream()
        taken = self._segments.streams
        if taken is not None and taken.get(self.rank) != stream and not self._gpu.is_capturing():
            for peer, other in taken.items():
                if other == stream and peer != self.rank:
                    raise InvalidConfig(
                        f"stream: got the one that virtual rank {peer} uses, expected one for each rank; run every "
                        "rank under its own torch.cuda.stream(...)",
                        rank=self.rank,
                        peer=peer,
                    )
            taken[self.rank] = stream
        return stream

    @contextmanager
    def _exclusive(self, op: Op) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUse(f"rank {self.rank}: another thread is inside an op of this buffer", op=op)
        try:
            yield
        finally:
            self._lock.release()

    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        self.health()
        self._end(REFUSAL_CODES[type(error)], error)
        raise error

    def health(self) -> None:
        if self._pid != os.getpid():
            raise GroupClosed("got a use after fork, expected the process that made the buffer", rank=self.rank)
        if self._closed:
            raise GroupClosed("the buffer was closed on this rank; expected an open one", rank=self.rank)
        if self._ended is not None:
            raise GroupPoisoned(f"rank {self.rank} ended the group: {self._ended}", rank=self.rank) from self._ended
        status = _engine.reported(self._record_address)
        if status is not None:
            raise error_from_status(status, self.rank, self.timeout_s)

    def timings(self) -> dict[str, Any]:
        raise InvalidConfig("timings: got a CUDA buffer, whose ops the host does not watch; expected a CPU buffer")

    def poison(self) -> None:
        self._end(Code.POISONED, GroupPoisoned("this rank aborted", rank=self.rank))

    def _end(self, code: Code, cause: MoeRtError) -> None:
        if self._ended is None and not self._closed:
            self._ended = cause
            self._tell_peers("give_up", code)

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        # At interpreter exit the driver may be gone already; the peers' timeouts then have to do.
        with suppress(MoeRtError, RuntimeError):
            self._tell_peers("leave", 0)
            regions = [m for m in self._segments.mappings if isinstance(m, Tensor)]
            for memory in (*self._memory, *regions, self._record):
                self._gpu.outlive_stream(memory)
        self._closed = True
        self._segments.release()

    def _tell_peers(self, kernel: str, code: int) -> None:
        with self._lock:
            struct.pack_into("<Q", self._args, 0, code)
            self._launch(kernel, 1, self._gpu.stream())


def _blocks_of_a_wait(spec: BufferSpec, segments: Segments, gpu: Gpu, num_sms: int | None) -> int:
    """How many blocks may wait at once. Virtual ranks share a GPU: all their waits must fit beside a launch that sends."""
    share = gpu.num_sms
    if segments.streams is not None and spec.num_ranks > 1:
        share = (gpu.num_sms - max(1, gpu.num_sms // 8)) // spec.num_ranks
    if share < 1:
        raise InvalidConfig(
            f"group: got {spec.num_ranks} virtual ranks on a GPU of {gpu.num_sms} multiprocessors, expected fewer: the "
            "launches that wait must all be resident at once"
        )
    if num_sms is None:
        return share
    if not 1 <= num_sms <= share:
        raise InvalidConfig(f"num_sms: got {num_sms}, expected 1 to {share} for this GPU and heap")
    return num_sms
