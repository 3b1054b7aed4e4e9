"""The buffer: symmetric memory of one group, and dispatch and combine over it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from moe_rt.buffer.handle import Handle
from moe_rt.buffer.pending import Pending
from moe_rt.buffer.replicas import refuse_replicated_experts
from moe_rt.config.options import BufferOptions, HeapKind, Overflow, RecvLayout, Route, Sums
from moe_rt.config.placement import Placement
from moe_rt.config.topology import Topology
from moe_rt.config.tuning import Tuning
from moe_rt.diagnostics.report import Report
from moe_rt.engine.backend import first_failure, leave, open_engine
from moe_rt.engine.engine import Engine
from moe_rt.errors import InvalidConfig, InvalidInput, Op
from moe_rt.group.groups import Group, rendezvous_of
from moe_rt.group.rendezvous import StoreRendezvous
from moe_rt.ops import table as ops


class Buffer:
    """Symmetric memory of one expert-parallel group, shared by all layers whose sizes fit it.

    The constructor is collective: every rank of the group makes its buffers in the same order. All ops of a buffer must
    be issued in the same order on every rank, including ranks without tokens.

    Args:
        group: a ProcessGroup; a DeviceMesh of one dimension, or of two (nodes, ranks of a node); a ThreadGroup (ranks
            are threads); or None: the default group, or a single rank if torch.distributed is not initialised and no
            launcher has started other ranks. ThreadGroup.make(1)[0] is always a single rank.
        num_max_tokens_per_rank: maximum number of tokens a rank dispatches in one call; identical on every rank.
        hidden: elements of a row (H).
        num_topk: entries of topk_idx for each token (K).
        num_experts: experts of the whole group (E), at least one per rank; need not be a multiple of the rank count.
        dtype: dtype of rows: torch.float32, bfloat16, float16 or float64. Sums use fp32 (fp64 for float64).
        layout: rows that a rank receives. "experts": one row for each (token, local expert); combine weights and sums
            them. "tokens": one row for each token that visits any local expert; the caller weights and sums the
            experts' outputs, and combine adds the ranks' sums.
        expert_alignment: 1, 8, 16, 32 or 128; with layout="experts", each expert's rows begin and end at a multiple of
            it. Padding rows are zero in recv_x, recv_weights and gradients; `handle.ends` and `handle.row_experts`
            identify them.
        heap: "shm" (ranks are processes of one host), "ucx" (of several hosts), "threads", "nvshmem" or "gin" (one GPU
            per process), "loopback" (threads that share one GPU), or "auto": chosen for the group, see docs/heap.md.
        capacity_factor: None sizes recv_x for the worst case, which cannot overflow; else for this many balanced loads.
        overflow: action beyond capacity: "raise" CapacityOverflow on every rank before any row is delivered; "drop" the
            last rows in the order expert, source rank, token, and count them in `handle.num_dropped`; or "retry"
            immediately with a larger capacity, which later dispatches keep (CPU ranks, eager: shapes change).
        dispatch_dtype: torch.float8_e4m3fn or torch.int8 sends rows to experts as one-byte codes with one fp32 scale
            per 128 elements; None sends them unchanged. Gradients are never coded. docs/payload.md has the errors.
        combine_dtype: same as dispatch_dtype, for the sums that combine sends.
        route: path of rows between nodes: "flat", "two_level" or "auto"; see docs/two_level.md.
        sums: order of combine's and dispatch's backward's sums. "ranked": each rank sums a token's rows and rounds;
            these sums are added in rank order. "invariant": a token's rows return one by one and are added in the order
            of its topk_idx, so results have the same bits for any number of ranks, placement, heap and route
            (docs/howto/equal_bits.md). Not with layout="tokens".
        depth: ops that may be under way, begun with wait=False and not waited for; identical on every rank. Memory and
            windows are multiplied by it (docs/protocol.md); results are the same. Not with overflow="retry".
        timeout_s: seconds an op waits for a peer before PeerTimeout ends the group; math.inf disables the timeout.
        init_timeout_s: seconds that all waits of the constructor may take together.
        placement: rank of each expert, length E, or a Placement; None places contiguous blocks.
        num_threads: host threads that run this rank's ops on the CPU.
        num_sms: multiprocessors that an op's launches may fill on a GPU (docs/cuda.md); None: the heap's limit.
        tuning: numbers that decide speed and no result, a `moe_rt.Tuning`.

    Raises:
        InvalidConfig, ConfigMismatch: on every rank, if a value is invalid on some rank or differs between ranks.
        OutOfSharedMemory, SegmentPermission: on every rank, if a segment cannot be made or opened.
        LimitReached: on every rank, if the system grants some rank too few descriptors or threads.
        PeerTimeout, PeerDead, StoreLost, GroupPoisoned: a rank did not join, can no longer join, or gave up.

    Example:
        >>> buffer = Buffer(None, num_max_tokens_per_rank=16, hidden=8, num_topk=2, num_experts=4, dtype=torch.float32)
    """

    def __init__(
        self,
        group: Group,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype,
        layout: RecvLayout = "experts",
        expert_alignment: int = 1,
        heap: HeapKind | Literal["auto"] = "auto",
        capacity_factor: float | None = None,
        overflow: Overflow = "raise",
        dispatch_dtype: torch.dtype | None = None,
        combine_dtype: torch.dtype | None = None,
        route: Route | Literal["auto"] = "auto",
        sums: Sums = "ranked",
        depth: int = 1,
        timeout_s: float = 120.0,
        init_timeout_s: float = 300.0,
        placement: Placement | Sequence[int] | None = None,
        num_threads: int = 1,
        num_sms: int | None = None,
        tuning: Tuning = BufferOptions.tuning,
    ) -> None:
        options = BufferOptions(
            heap=heap,
            capacity_factor=capacity_factor,
            overflow=overflow,
            dispatch_dtype=dispatch_dtype,
            combine_dtype=combine_dtype,
            route=route,
            sums=sums,
            depth=depth,
            timeout_s=timeout_s,
            init_timeout_s=init_timeout_s,
            placement=placement,
            num_threads=num_threads,
            num_sms=num_sms,
            tuning=tuning,
        )
        sizes: dict[str, Any] = dict(
            num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk, num_experts=num_experts,
            dtype=dtype, layout=layout, expert_alignment=expert_alignment,
        )  # fmt: skip
        rendezvous = rendezvous_of(group)
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.size
        self.process_group = rendezvous.group if isinstance(rendezvous, StoreRendezvous) else None  # None: threads
        with rendezvous:  # an exception in this block is reported to the peers
            self.spec, self.heap, self._engine = open_engine(rendezvous, options, sizes)
        self._acc_dtype = self.spec.acc_dtype
        # True if a handle has recv_topk_idx or real_ends, which `dispatch` then sets.
        self._extended_handle = self.spec.by_token or self.spec.expert_alignment > 1
        self._num_tags = 0
        # Runs when the buffer is garbage or the interpreter ends, unless close() has run before.
        self._finalizer = weakref.finalize(self, leave, self._engine)

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self._engine.device

    @property
    def capacity(self) -> int:
        """Number of rows of recv_x on this rank; grows with overflow="retry"."""
        return self._engine.capacity

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank (L)."""
        return self.spec.placement.num_local(self.rank)

    @property
    def topology(self) -> Topology:
        """Node of each rank."""
        return self.spec.topology

    @property
    def route(self) -> Route:
        """Path of rows between nodes: "flat" or "two_level"."""
        return "two_level" if self.spec.route == "two_level" else "flat"

    @property
    def num_bytes(self) -> int:
        """Size of this rank's symmetric memory in bytes; docs/protocol.md has the formula."""
        return self._engine.shape.segment_bytes()

    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        tag: int = 0,
        max_tokens: int | None = None,
        coded: Literal[False] = False,
    ) -> tuple[Tensor, Tensor, Handle]: ...
    @overload
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        tag: int = 0,
        max_tokens: int | None = None,
        coded: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Handle]: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        tag: int = 0,
        max_tokens: int | None = None,
        coded: Literal[True],
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Handle]: ...
    @overload
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        tag: int = 0,
        max_tokens: int | None = None,
        coded: bool = False,
        wait: Literal[False],
    ) -> Pending[tuple[Any, Tensor, Handle]]: ...
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        tag: int = 0,
        max_tokens: int | None = None,
        coded: bool = False,
        wait: bool = True,
    ) -> Any:
        """Send every token to the ranks of its experts. Differentiable in x and topk_weights. Collective.

        A token that names an expert twice visits it once, with the sum of both weights.

        Args:
            x: [T, H] of the buffer's dtype, 0 <= T <= num_max_tokens_per_rank; T may differ between ranks. Or (codes,
                scales), delivered bit for bit: codes [T, H] of float8_e4m3fn, float8_e5m2, int8 or uint8, or uint8
                [T, H/2], two codes per byte; scales [T, S] of float32, int32 or uint8. Their dtypes and sizes are
                identical on every rank; together they fit in a row of the buffer's dtype. They have no gradients.
            topk_idx: int64 or int32 [T, K]; expert ids, or -1 for none.
            topk_weights: floating [T, K].
            tag: identifies the layer, in [0, 2**28), so that ranks that run layers in different order raise.
            max_tokens: maximum number of tokens of any rank in this call, identical on every rank, in
                [1, num_max_tokens_per_rank]; it sets the capacity of recv_x. None: num_max_tokens_per_rank.
            coded: with a dispatch_dtype, True returns rows as they travel: (codes [capacity, H], fp32 scales [capacity,
                ceil(H / 128)]), without gradients. Each rank chooses for itself.
            wait: False only announces the tokens, and returns a Pending whose `wait()` receives and returns the rest.
                Each rank chooses for itself.

        Returns:
            recv_x [capacity, H], or (codes, scales) with `capacity` rows each, in the order local expert, source rank,
            token; recv_weights [capacity], the weight of each row (fp32, or fp64 for fp64); and the handle, whose
            `offs` delimit the experts. With layout="tokens", rows are in the order source rank, token; recv_weights is
            [capacity, K], zero where the handle's `recv_topk_idx` is -1; and `offs` delimit the source ranks. With
            max_tokens, capacity is that of a buffer made for max_tokens tokens per rank.

        Raises:
            InvalidInput, InvalidRouting, TooManyTokens, CapacityOverflow: on every rank, in this op; the buffer can be
                used again.
            ConfigMismatch: ranks gave different max_tokens, or codes and scales of different dtypes or sizes, or only
                some ranks gave them; the group is over.
            PeerDead, PeerTimeout, GroupPoisoned, GroupClosed, CorruptPeer, CallOrderMismatch: the group is over.
            ConcurrentUse: another thread is inside an op of this buffer.
        """
        given = topk_weights  # any other type or dtype is refused below, on every rank
        if isinstance(given, Tensor) and given.dtype is not self._acc_dtype and given.is_floating_point():
            topk_weights = given.to(self._acc_dtype)
        routing: Any = (topk_idx, topk_weights, self._engine, tag, max_tokens)
        if wait is False:
            return self._begin_dispatch(x, coded, *routing)
        if coded is not False or isinstance(x, tuple):
            return self._received(tag, ops.dispatch_scaled(*self._engine.codes_and_scales(tag, x, coded), *routing))
        recv_x, recv_weights, offs, recv_plan, send_plan = ops.dispatch(x, *routing)
        handle = Handle(offs=offs, recv_plan=recv_plan, send_plan=send_plan, tag=tag)
        if self._extended_handle:
            self._attach_views(handle, recv_weights)
        return recv_x, recv_weights, handle

    def _begin_dispatch(self, x: Any, coded: Any, *routing: Any) -> Pending[tuple[Any, Tensor, Handle]]:
        tag = routing[3]
        if coded is not False or isinstance(x, tuple):
            given = *self._engine.codes_and_scales(tag, x, coded), *routing
            ticket = ops.dispatch_scaled_begin(*given)
            return Pending(ops.dispatch_scaled_finish, (ticket, *given), partial(self._received, tag))
        ticket = ops.dispatch_begin(x, *routing)
        return Pending(ops.dispatch_finish, (ticket, x, *routing), partial(self._received, tag))

    def _received(self, tag: int, outputs: tuple[Tensor, ...]) -> tuple[Any, Tensor, Handle]:
        recv_x, recv_weights, offs, recv_plan, send_plan, *recv_scales = outputs
        handle = Handle(offs=offs, recv_plan=recv_plan, send_plan=send_plan, tag=tag)
        if self._extended_handle:
            self._attach_views(handle, recv_weights)
        return (recv_x, *recv_scales) if recv_scales else recv_x, recv_weights, handle

    def _attach_views(self, handle: Handle, recv_weights: Tensor) -> None:
        """Set the handle's recv_topk_idx or real_ends: views of the end of recv_plan, where the op has written them."""
        written = handle.recv_plan[self._engine.ids_at :]
        if self.spec.by_token:
            handle.recv_topk_idx = written[: recv_weights.numel()].view(recv_weights.shape)
        else:
            handle.real_ends = written[: self.num_local_experts]

    def token_window(self, num_tokens: int) -> Tensor:
        """Return memory for the rows of the next dispatch, so that it copies none of them. Local.

        Write rows into the tensor in place and pass it, or its first rows, to `dispatch` as x; only their routing is
        then left to publish. That dispatch must be the next op of this buffer. After any op the tensor is refused, on
        every rank, and its contents are unspecified; ask again for each dispatch. On a GPU, write it on the stream of
        the ops. It is not for training: a dispatch with recorded gradients refuses it. Under torch.compile it is
        ordinary memory, whose rows are copied, because a graph writes to its inputs only at its end.

        Args:
            num_tokens: number of rows, in [0, num_max_tokens_per_rank].

        Returns:
            [num_tokens, H] of the buffer's dtype, uninitialised; contiguous if a row's size is a multiple of 64 bytes.

        Raises:
            InvalidInput: num_tokens is out of range.
            InvalidConfig: the buffer has a dispatch_dtype, because codes are written into the window by the op; or the
                stream is being captured into a CUDA graph, or an op of this buffer was.
            PeerDead, PeerTimeout, GroupPoisoned, GroupClosed: the group is over.
        """
        if is_dynamo_compiling():
            return _rows_for_a_graph(self._engine, num_tokens)
        compiler = set_eval_frame(None)  # dynamo must not trace into the calls below
        try:
            return self._engine.token_window(num_tokens, compiled=compiler is not None)
        finally:
            set_eval_frame(compiler)

    @overload
    def combine(
        self, y: Tensor, recv_weights: Tensor | None, handle: Handle, *, out: Tensor | None = None
    ) -> Tensor: ...
    @overload
    def combine(
        self, y: Tensor, recv_weights: Tensor | None, handle: Handle, *, wait: Literal[False]
    ) -> Pending[Tensor]: ...
    def combine(
        self,
        y: Tensor,
        recv_weights: Tensor | None,
        handle: Handle,
        *,
        out: Tensor | None = None,
        wait: bool = True,
    ) -> Tensor | Pending[Tensor]:
        """Return the experts' rows to their tokens: out[t] sums recv_weights * y over the rows of token t. Collective.

        Differentiable in y and recv_weights. Each rank first sums its own rows of a token and rounds this partial to
        the dtype of rows; partials are added in rank order. With layout="tokens" each row is a partial, added as it is.

        Args:
            y: [N, H] of the buffer's dtype, handle.offs[-1] <= N <= capacity; rows past handle.offs[-1] are not read.
            recv_weights: [capacity], as returned by dispatch; None with layout="tokens".
            handle: the handle of the dispatch that returned these rows.
            out: contiguous [T, H] of the buffer's dtype, written and returned; it may share memory with y. Allowed only
                while no gradients are recorded.
            wait: False only sends the rows, and returns a Pending whose `wait()` returns out; not with `out`.

        Returns:
            out [T, H], T as in that dispatch; tokens without experts are zero.

        Raises:
            MoeRtError: see `dispatch`.
        """
        if not isinstance(handle, Handle):
            self._engine.refuse_handle(handle)
        refuse_replicated_experts(self, y)
        if wait is False:
            if out is not None:
                self._engine._refuse_input(Op.COMBINE, handle.tag, "out: got wait=False also, expected one of them")
            given = y, recv_weights, handle.recv_plan, handle.send_plan, self._engine, handle.tag
            return Pending(ops.combine_finish, (ops.combine_begin(*given), *given), _itself)
        if out is not None:
            ops.combine_out(y, recv_weights, handle.recv_plan, handle.send_plan, self._engine, handle.tag, out=out)
            return out
        return ops.combine(y, recv_weights, handle.recv_plan, handle.send_plan, self._engine, handle.tag)

    def refuse(self, error: InvalidInput, *, tag: int = 0) -> NoReturn:
        """Raise `error`, and InvalidInput on every peer, in place of a dispatch with invalid input. Collective."""
        self._engine._refuse(Op.DISPATCH, tag, error, 0, 0)

    def new_tag(self) -> int:
        """Return an unused layer tag. Layers must ask for their tags in the same order on every rank."""
        self._num_tags += 1
        return self._num_tags

    def reserve_tags(self, tag: int) -> None:
        """Exclude this tag and all lower ones from `new_tag`: a layer that got its tag elsewhere uses it here."""
        self._num_tags = max(self._num_tags, tag)

    def check(self) -> None:
        """Raise the error that ended the group, if any. Local; never blocks."""
        self._engine.health()

    def timings(self) -> dict[str, Any]:
        """Durations of the phases of this rank's last op, in nanoseconds.

        Returns:
            op; before_ns (publish or push), wait_ns, after_ns (gather or reduce); arrival_ns: for each peer, time from
            the begin of this rank's wait until it observed the peer's signal, checking peers in rank order;
            line_latency_ns: for each peer, time to read a cache line that the peer has just written: 10 to 20 if both
            share a cache, 100 and more if not. Each dispatch measures one peer; an estimate grows by at most half.
        """
        return self._engine.timings()

    def waited_ns(self) -> list[int]:
        """Time that this rank has waited for each peer since the buffer was made, in nanoseconds, [R].

        Peers are checked in rank order, so a wait counts for the first one that is late. Empty on CUDA ranks, whose
        waits run on the device.
        """
        return self._engine.waited_ns()

    def report(self) -> Report:
        """Report what every rank of the group does and which rank it waits for, also while ranks are inside an op.

        Local: it is read from the segments, so it includes ranks that hang or are dead. CPU ranks only. Errors of a
        failed wait have one as their attribute `report`; docs/diagnostics.md explains it.

        Raises:
            GroupClosed: this rank has closed the buffer, and with it its view of the others.
            InvalidConfig: the buffer's ranks are on GPUs.
        """
        return self._engine.report()

    @property
    def closed(self) -> bool:
        """True once this rank has closed the buffer."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Close the buffer. Local and idempotent: peers that still wait for this rank raise GroupClosed."""
        if self._finalizer.detach():
            self._engine.close()

    def abort(self, error: BaseException | None = None) -> None:
        """End the group on every rank, if this rank cannot continue: peers raise GroupPoisoned immediately.

        CPU ranks send their peers the cause: `error`, or the exception that is being handled.
        """
        try:
            if self._finalizer.alive:
                self._engine.poison(error or sys.exc_info()[1])
        finally:
            self.close()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return self.close()
        first = first_failure(self._engine, error)
        self.abort(error)
        if first is not None:
            raise first from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        return self  # a copied layer shares its group

    def __reduce__(self) -> NoReturn:
        raise InvalidConfig("pickle: got a Buffer, memory that a group shares; expected it to be made anew everywhere")

    def __repr__(self) -> str:
        return f"Buffer(rank {self.rank} of {self.num_ranks}, heap={self.heap}, {self.num_bytes} bytes, {self.spec})"


def _itself(out: Tensor) -> Tensor:
    return out


@_disable_dynamo  # an explicit graph break: dynamo warns of the breaks that it finds itself
def _rows_for_a_graph(engine: Engine, num_tokens: int) -> Tensor:
    return engine.token_window(num_tokens, compiled=True)
