"""The CUDA engine: an op is one to five launches on torch's current stream, and the host never waits for the device.

A failure on the device is reported to page-locked host memory and raised at the next op or check. By then this rank
may have queued ops that its peers have not, so on CUDA every error ends the group.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec
from moe_rt.config.tuning import Tuning
from moe_rt.diagnostics.report import Report
from moe_rt.engine.engine import Engine
from moe_rt.engine.gpu.driver import Gpu
from moe_rt.engine.gpu.launcher import Launcher
from moe_rt.engine.halves import Args, Begun
from moe_rt.engine.statuses import error_from_status, refusal_code
from moe_rt.errors import (
    Code,
    CompileError,
    ConcurrentUse,
    GroupClosed,
    GroupPoisoned,
    InvalidConfig,
    InvalidInput,
    LaunchFailed,
    MoeRtError,
    Op,
)
from moe_rt.memory.segments import Segments


class _Launches(NamedTuple):
    """The kernels of an op, and which rows each works through: this rank's tokens, or the rows it received."""

    send: str
    wait: str  # one block, launched if there are many tokens
    receive: str
    sends_received: bool
    first_wait: str  # few blocks, launched before `forward` in two levels
    forward: str
    whole: str | None  # the whole op, in a buffer for very few tokens


_COMBINE = _Launches(
    "combine_send",
    "combine_wait",
    "combine_receive",
    sends_received=True,
    first_wait="combine_first_wait",
    forward="combine_forward",
    whole="combine_whole",
)
_LAUNCHES = {
    Op.DISPATCH: _Launches(
        "dispatch_send",
        "dispatch_wait",
        "dispatch_receive",
        sends_received=False,
        first_wait="dispatch_lists",
        forward="dispatch_forward",
        whole="dispatch_whole",
    ),
    Op.COMBINE: _COMBINE,
    Op.DISPATCH_BACKWARD: _COMBINE,
    Op.COMBINE_BACKWARD: _Launches(
        "combine_backward_send",
        "combine_backward_wait",
        "combine_backward_receive",
        sends_received=False,
        first_wait="combine_backward_first_wait",
        forward="combine_backward_forward",
        whole=None,
    ),
}
_taking_a_stream = threading.Lock()


class CudaEngine(Engine):
    """A rank that is a GPU, or shares one with others.

    Args:
        network: symmetric memory for reaching unmapped peers, if any exist.
        max_blocks: maximum blocks of a launch that moves rows; see blocks_of_a_wait.
        num_sms: the same number, if the caller has set it.

    Raises:
        The errors of Launcher.
    """

    pushes = True
    vector_bytes = 16

    def __init__(
        self,
        spec: BufferSpec,
        rank: int,
        segments: Segments,
        gpu: Gpu,
        *,
        network: Segments | None,
        timeout_s: float,
        max_blocks: int,
        num_sms: int | None,
    ) -> None:
        super().__init__(spec, rank, gpu.device, timeout_s)
        self._segments, self._network, self._gpu = segments, network, gpu
        plan_mark = _engine.new_plan_mark()

        def launcher(channel: int) -> Launcher:
            return Launcher(
                spec, rank, segments, network, gpu, timeout_s=timeout_s, max_blocks=max_blocks, num_sms=num_sms,
                channel=channel, plan_mark=plan_mark,
            )  # fmt: skip

        # Launchers of the next op's channel, and of the others in the order of their turns.
        self._launcher, *others = map(launcher, range(spec.depth))
        self._others = deque(others)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ended: MoeRtError | None = None
        self._captured = self._closed = False

    def _rows(self, num_rows: int, like: Tensor) -> Tensor:
        return like.new_empty(num_rows, self.spec.hidden)

    def _matrix(self, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, columns, dtype=dtype, device=self.device)

    def _input(self, t: Tensor) -> Tensor:
        t = super()._input(t)
        # A view may start anywhere; kernels load whole vectors.
        return t if t.data_ptr() % self.vector_bytes == 0 else t.clone()

    def _writable(self, out: Tensor) -> Tensor:
        return out if out.data_ptr() % self.vector_bytes == 0 else self._rows(out.shape[0], out)  # aligned like inputs

    def _grow(self, max_tokens: int) -> bool:
        return False  # the host does not see the overflow

    def _next_window(self) -> int | None:
        if self._captured or self._gpu.is_capturing():  # a replay runs ops that are not queued here
            return None
        return 2 * self._launcher.channel + self._launcher.windows.next(Op.DISPATCH)

    def _run(self, op: Op, args: Args, tag: int) -> None:
        if self._begun:
            self._end_before(op, tag)
        try:
            with self._exclusive(op):
                self.health()
                stream = self._stream()
                self._launcher.set_call(args, tag)
                self._launcher.launch(self._queue(op, args), stream)
                self._has_announced(op)
        except LaunchFailed as error:  # perhaps between two launches: peers must not wait for the second
            self._end(Code.POISONED, error)
            raise

    def _has_announced(self, op: Op) -> None:
        self._launcher.windows.take(op)
        if self._others:
            self._others.append(self._launcher)
            self._launcher = self._others.popleft()
        self._captured = self._captured or self._gpu.is_capturing()
        if self._windows is not None:
            self._windows.retire()

    def _run_first(self, begun: Begun) -> None:
        begun.launcher = self._launcher
        self._run_half(begun, self._launches(begun.op, begun.args)[:1])
        begun.stream, begun.captured = self._gpu.current(), self._gpu.is_capturing()
        self._has_announced(begun.op)

    def _run_second(self, begun: Begun) -> None:
        if begun.captured is not self._gpu.is_capturing():
            where = "a captured graph" if begun.captured else "no graph"
            message = f"wait: got an op begun in {where}, expected both halves in one graph, or in none"
            raise InvalidInput(message, rank=self.rank, op=begun.op)
        outputs = begun.outputs if isinstance(begun.outputs, tuple) else (begun.outputs,)
        self._gpu.follow(begun.stream, [t for t in (*begun.used, *outputs) if t is not None])
        self._run_half(begun, self._launches(begun.op, begun.args)[1:])

    def _run_half(self, begun: Begun, queue: list[tuple[str, int]]) -> None:
        try:
            with self._exclusive(begun.op):
                self.health()
                stream = self._stream()
                begun.launcher.set_call(begun.args, begun.tag)
                begun.launcher.launch_half(queue, stream)
        except (LaunchFailed, CompileError) as error:
            self._end(Code.POISONED, error)
            raise

    def _queue(self, op: Op, args: Args) -> list[tuple[str, int]]:
        """Return the launches of a whole op, and the number of blocks of each."""
        whole = _LAUNCHES[op].whole
        if whole is not None and self._launcher.whole:
            return [(whole, 1)]
        return self._launches(op, args)

    def _launches(self, op: Op, args: Args) -> list[tuple[str, int]]:
        """Return the launches of an op, the first of which is the first half."""
        launches, most = _LAUNCHES[op], self._launcher.max_blocks
        tokens, received = args.num_tokens, self.spec.num_ranks * self.spec.num_max_tokens_per_rank
        before, after = (received, tokens) if launches.sends_received else (tokens, received)
        sending = self._blocks(before)
        if op is Op.DISPATCH:  # one in so many may route; more than `most` would start only after the routing blocks
            sending = max(2, min(1 + tokens + tokens // (_engine.BLOCKS_PER_ROUTER - 1), most))
        queue = [(launches.send, sending), *self._forwarding(op, launches, tokens)]
        if tokens >= self.spec.tuning.wait_apart_tokens:
            queue.append((launches.wait, 1))
        if self._network is not None and not self.spec.node_of and op is Op.DISPATCH:
            queue.append(("dispatch_fetch", min(self.spec.num_ranks, most)))
        return [*queue, (launches.receive, self._blocks(after))]

    def _forwarding(self, op: Op, launches: _Launches, tokens: int) -> list[tuple[str, int]]:
        """Return the launches that forward rows for the remote ranks that this rank is the proxy of."""
        clients = self._launcher.num_clients
        if clients == 0:
            return []
        forward = (launches.forward, self._blocks(clients * self.spec.num_max_tokens_per_rank))
        if op is Op.DISPATCH:  # one block per source's lists
            return [(launches.first_wait, min(clients, self._launcher.max_blocks)), forward]
        return [(launches.first_wait, 1), forward] if tokens >= self.spec.tuning.wait_apart_tokens else [forward]

    def _blocks(self, num_rows: int) -> int:
        return max(1, min(self._launcher.max_blocks, num_rows))

    def _stream(self) -> int:
        """Return the current stream. Virtual ranks of a GPU must not share one: each would queue after a peer."""
        stream = self._gpu.stream()
        taken = self._segments.streams
        if taken is not None and taken.get(self.rank) != stream and not self._gpu.is_capturing():
            with _taking_a_stream:  # of two ranks that come at once, the second finds the first one's stream
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
            message = f"rank {self.rank}: another thread is inside an op of this buffer; expected one op at a time"
            raise ConcurrentUse(message, rank=self.rank, op=op)
        try:
            yield
        finally:
            self._lock.release()

    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        self.health()
        self._end(refusal_code(error), error)
        raise error

    def health(self) -> None:
        if self._pid != os.getpid():
            raise GroupClosed("got a use after fork, expected the process that made the buffer", rank=self.rank)
        if self._closed:
            raise GroupClosed("the buffer was closed on this rank; expected an open one", rank=self.rank)
        if self._ended is not None:
            raise GroupPoisoned(
                f"rank {self.rank} ended the group: {self._ended.args[0]}", rank=self.rank
            ) from self._ended
        for launcher in (self._launcher, *self._others):
            status = launcher.reported()
            if status is not None:
                raise error_from_status(status, self.rank, self.timeout_s)

    def timings(self) -> dict[str, Any]:
        raise InvalidConfig("timings: got a CUDA buffer, whose ops the host does not watch; expected a CPU buffer")

    def report(self) -> Report:
        raise InvalidConfig("report: got a CUDA buffer, whose ops the host does not watch; expected a CPU buffer")

    def waited_ns(self) -> list[int]:
        """Return no times: the host does not watch its ops wait."""
        return []

    def poison(self, error: BaseException | None = None) -> None:
        aborted = GroupPoisoned("this rank aborted", rank=self.rank)
        aborted.__cause__ = error
        self._end(Code.POISONED, aborted)

    def _end(self, code: Code, cause: MoeRtError) -> None:
        """End the group; the first cause is kept. A dead GPU announces nothing: peers time out, this rank raises."""
        if self._ended is None and not self._closed:
            self._ended = cause
            with suppress(RuntimeError):  # LaunchFailed, or torch's own errors
                self._tell_peers("abort_group", code)

    def close(self, why: str = "") -> None:
        if self._closed or self._pid != os.getpid():
            return
        # The driver may be gone at interpreter exit. Then peers time out.
        with suppress(MoeRtError, RuntimeError):
            self._tell_peers("leave", 0)
            held = [self._segments] if self._network is None else [self._segments, self._network]
            regions = [m for segments in held for m in segments.mappings if isinstance(m, Tensor)]
            kept = [m for launcher in (self._launcher, *self._others) for m in (*launcher.memory, launcher.record)]
            for memory in (*kept, *regions):
                self._gpu.outlive_stream(memory)
        self._closed = True
        self._segments.release()
        if self._network is not None:
            self._network.release()

    def _tell_peers(self, kernel: str, code: int) -> None:
        with self._lock:
            for launcher in (self._launcher, *self._others):
                launcher.set_call(_engine.EndArgs(code=code), 0)
                launcher.launch([(kernel, 1)], self._gpu.stream())


def blocks_of_a_wait(
    num_waits: int, gpu: Gpu, num_sms: int | None, *, shared: bool, sending_part: int = Tuning.sending_part
) -> int:
    """Return how many blocks of one rank may wait simultaneously: `num_sms`, or all that fit on the GPU.

    Virtual ranks share a GPU: all their waits, `num_waits`, must be resident together with a launch that sends, for
    which one multiprocessor in `sending_part` stays free.

    Raises:
        InvalidConfig: they do not fit.
    """
    share = gpu.num_sms
    if shared and num_waits > 1:
        share = (gpu.num_sms - max(1, gpu.num_sms // sending_part)) // num_waits
    if share < 1:
        raise InvalidConfig(
            f"group: got {num_waits} waits of virtual ranks, ranks times depth, on a GPU of {gpu.num_sms} "
            "multiprocessors, expected fewer: the launches that wait must all be resident together"
        )
    if num_sms is None:
        return share
    if not 1 <= num_sms <= share:
        raise InvalidConfig(f"num_sms: got {num_sms}, expected 1 to {share} for this GPU and heap")
    return num_sms
