"""The buffer: one group's symmetric memory, and dispatch and combine over it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.comm import ops
from moe_rt.comm.agreement import agree
from moe_rt.comm.handle import Handle
from moe_rt.comm.observed import Observed
from moe_rt.comm.replicas import refuse_replicated_experts
from moe_rt.config.options import BufferOptions, HeapKind, Overflow, RecvLayout, Route
from moe_rt.config.placement import Placement
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig, InvalidInput, Op
from moe_rt.faults import Point, planned, reach
from moe_rt.heap.groups import Group, rendezvous_of
from moe_rt.heap.rendezvous import StoreRendezvous
from moe_rt.native.backend import Backend, choose_backend, choose_route, find_hosts, make_engine
from moe_rt.native.leaving import first_failure, leave


class Buffer(Observed):
    """Symmetric memory of one expert-parallel group, shared by all layers whose sizes fit it.

    Making a buffer is collective: every rank of the group makes it, in the same order. All ops of a buffer must be
    issued in the same order on every rank, by ranks without tokens too.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or of two, nodes and the ranks of a node, a ThreadGroup
            (ranks are threads), or None: the default group, or a single rank where torch.distributed is not initialised
            and no launcher has started others; ThreadGroup.make(1)[0] is a single rank everywhere.
        num_max_tokens_per_rank: the most tokens a rank will dispatch at once; the same on every rank.
        hidden: elements of a row (H).
        num_topk: entries of topk_idx for each token (K).
        num_experts: experts of the whole group (E); need not divide by the number of ranks.
        dtype: of rows: torch.float32, bfloat16, float16 or float64. Sums are taken in fp32 (fp64 for float64).
        layout: of what a rank receives. "experts": a row for each (token, local expert), and combine weighs and adds
            them. "tokens": a row for each token, however many of the rank's experts it visits; they weigh and add what
            they make of it, and combine adds the ranks' sums.
        expert_alignment: 1, 8, 16, 32 or 128: with layout="experts", each expert's rows begin and end at a multiple.
            What is between the last of them and the end is zero, in recv_x, recv_weights and gradients; `handle.ends`
            and `handle.row_experts` tell it from rows.
        heap: "shm" (ranks are processes of one host), "ucx" (of several), "threads", "nvshmem" or "gin" (with a
            GPU each), "loopback" (threads that share one GPU), or "auto": what fits the group, see docs/heap.md.
        capacity_factor: None sizes recv_x for the worst case, which cannot overflow; else this many balanced loads.
        overflow: what happens beyond capacity: "raise" CapacityOverflow on every rank before any row is delivered;
            "drop" the last rows in the order expert, source rank, token, and count them in `handle.num_dropped`; or
            "retry" at once with room for all, which later dispatches keep (CPU ranks, eager: shapes change).
        dispatch_dtype: torch.float8_e4m3fn or torch.int8 sends rows to experts as codes of one byte with an fp32 scale
            for every 128; None sends them as they are. Gradients are never coded. docs/payload.md has the errors.
        combine_dtype: the same for the sums that come home.
        route: how rows go between nodes: "flat", "two_level" or "auto"; see docs/two_level.md.
        timeout_s: seconds an op waits for a peer before PeerTimeout ends the group; math.inf for ever.
        init_timeout_s: the same for making the buffer, in all its waits together.
        placement: rank of each expert, length E, or a Placement; None places contiguous blocks.
        num_threads: host threads that run this rank's ops on the CPU.
        num_sms: multiprocessors that an op's launches may fill on a GPU (docs/cuda.md); None for all the heap allows.

    Raises:
        InvalidConfig, ConfigMismatch: on every rank, when a value makes no sense on any rank or differs between ranks.
        OutOfSharedMemory, SegmentPermission: on every rank, when a segment cannot be made or opened.
        LimitReached: on every rank, when the system grants one of them too few descriptors or threads.
        PeerTimeout, PeerDead, StoreLost, GroupPoisoned: a rank did not come, never will, or gave up.

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
        timeout_s: float = 120.0,
        init_timeout_s: float = 300.0,
        placement: Placement | Sequence[int] | None = None,
        num_threads: int = 1,
        num_sms: int | None = None,
    ) -> None:
        options = BufferOptions(
            heap=heap, capacity_factor=capacity_factor, overflow=overflow, dispatch_dtype=dispatch_dtype,
            combine_dtype=combine_dtype, route=route, timeout_s=timeout_s, init_timeout_s=init_timeout_s,
            placement=placement, num_threads=num_threads, num_sms=num_sms,
        )  # fmt: skip
        rendezvous = rendezvous_of(group)
        backends: list[Backend] = []
        faults: list[_engine.Fault] = []

        def make_spec() -> BufferSpec:
            backends.append(choose_backend(rendezvous, heap))
            faults.append(planned(rendezvous.rank, rendezvous.size, backends[0].gpu is None))
            reach(faults[0], Point.PRE_RENDEZVOUS)
            options.check_own()
            return BufferSpec.make(
                rendezvous.topology,
                options,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                dtype=dtype,
                layout=layout,
                expert_alignment=expert_alignment,
            )

        with rendezvous:  # whichever way this rank leaves, its peers learn of it
            self.spec = agree(rendezvous, make_spec, init_timeout_s)
            backend = find_hosts(backends[0], rendezvous, self.spec, init_timeout_s)
            self.spec = choose_route(self.spec, backend)
            self.rank, self.num_ranks, self.heap = rendezvous.rank, rendezvous.size, backend.heap
            self.process_group = rendezvous.group if isinstance(rendezvous, StoreRendezvous) else None  # None: threads
            self._engine = make_engine(backend, rendezvous, self.spec, options, faults[0])
        self._acc_dtype = self.spec.acc_dtype
        self._tells_more = self.spec.by_token or self.spec.expert_alignment > 1
        self._num_tags = 0
        # When the buffer is garbage or the interpreter ends, whichever is first; close() leaves by hand.
        self._finalizer = weakref.finalize(self, leave, self._engine)

    @overload
    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, tag: int = 0, max_tokens: int | None = None,
        coded: Literal[False] = False,
    ) -> tuple[Tensor, Tensor, Handle]: ...  # fmt: skip
    @overload
    def dispatch(
        self, x: tuple[Tensor, Tensor], topk_idx: Tensor, topk_weights: Tensor, *, tag: int = 0,
        max_tokens: int | None = None, coded: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Handle]: ...  # fmt: skip
    @overload
    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, tag: int = 0, max_tokens: int | None = None,
        coded: Literal[True],
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Handle]: ...  # fmt: skip
    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], topk_idx: Tensor, topk_weights: Tensor, *, tag: int = 0,
        max_tokens: int | None = None, coded: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Handle]:  # fmt: skip
        """Sends every token to the ranks of its experts. Differentiable in x and topk_weights. Collective.

        A token that names an expert twice visits it once, with the sum of both weights.

        Args:
            x: [T, H] of the buffer's dtype, 0 <= T <= num_max_tokens_per_rank; T may differ between ranks. Or (codes,
                scales), which arrive bit for bit: codes [T, H] of float8_e4m3fn, float8_e5m2, int8 or uint8, or uint8
                [T, H/2], two in a byte; scales [T, S] of float32, int32 or uint8; of dtypes and sizes that are the
                same on every rank, and together no longer than a row of the buffer's dtype. They have no gradients.
            topk_idx: int64 or int32 [T, K]; expert ids, or -1 for none.
            topk_weights: floating [T, K].
            tag: names the layer, in [0, 2**28), so that ranks that run layers in different order are told.
            max_tokens: the most tokens that any rank dispatches in this call, the same on every rank, in
                [1, num_max_tokens_per_rank]: what is received has rows for so many. None for num_max_tokens_per_rank.
            coded: with a dispatch_dtype: rows stay as they travel, (codes [capacity, H], fp32 scales [capacity,
                ceil(H / 128)]), for this rank alone to choose. They have no gradients either.

        Returns:
            recv_x [capacity, H], or (codes, scales) of so many rows each, in the order local expert, source rank,
            token; recv_weights [capacity], the weight of each row (fp32, or fp64 for fp64); and the handle, whose
            `offs` delimit the experts. With layout="tokens", rows in the order source rank, token; recv_weights
            [capacity, K], zero where the handle's `recv_topk_idx` is -1; and `offs` delimit the source ranks. With
            max_tokens, capacity is that of a buffer made for so many tokens a rank.

        Raises:
            InvalidInput, InvalidRouting, TooManyTokens, CapacityOverflow: on every rank, in this op; the buffer can be
                used again.
            ConfigMismatch: ranks gave different max_tokens, or codes and scales of other dtypes or sizes, or only some
                of them did; the group is over.
            PeerDead, PeerTimeout, GroupPoisoned, GroupClosed, CallOrderMismatch: the group is over.
            ConcurrentUse: another thread is inside an op of this buffer.
        """
        if (  # what is no tensor is refused below, on every rank
            isinstance(topk_weights, Tensor)
            and topk_weights.dtype is not self._acc_dtype
            and topk_weights.is_floating_point()
        ):
            topk_weights = topk_weights.to(self._acc_dtype)
        recv_scales = None
        if coded is not False or isinstance(x, tuple):
            codes, scales = self._engine.codes_and_scales(tag, x, coded)
            recv_x, recv_weights, offs, recv_plan, send_plan, recv_scales = ops.dispatch_scaled(
                codes, scales, topk_idx, topk_weights, self._engine, tag, max_tokens
            )
        else:
            recv_x, recv_weights, offs, recv_plan, send_plan = ops.dispatch(
                x, topk_idx, topk_weights, self._engine, tag, max_tokens
            )
        handle = Handle(offs=offs, recv_plan=recv_plan, send_plan=send_plan, tag=tag)
        if self._tells_more:
            self._tell_more(handle, recv_weights)
        return recv_x if recv_scales is None else (recv_x, recv_scales), recv_weights, handle

    def _tell_more(self, handle: Handle, recv_weights: Tensor) -> None:
        """Views of what the plan has behind all else."""
        told = handle.recv_plan[self._engine.ids_at :]
        if self.spec.by_token:
            handle.recv_topk_idx = told[: recv_weights.numel()].view(recv_weights.shape)
        else:
            handle.real_ends = told[: self.num_local_experts]

    def combine(self, y: Tensor, recv_weights: Tensor | None, handle: Handle, *, out: Tensor | None = None) -> Tensor:
        """Brings the experts' rows home: out[t] is the sum of recv_weights * y over the rows of token t. Collective.

        Differentiable in y and recv_weights. Each rank sums its own rows of a token first and rounds the partial to
        the dtype of rows; partials are added in rank order. With layout="tokens" each row is a partial, and is added as
        it is.

        Args:
            y: [N, H] of the buffer's dtype, handle.offs[-1] <= N <= capacity; rows past handle.offs[-1] are not read.
            recv_weights: [capacity], as dispatch returned them; None with layout="tokens".
            handle: of the dispatch that these rows come from.
            out: contiguous [T, H] of the buffer's dtype, to be written and returned; it may share memory with y. Only
                where no gradients are recorded.

        Returns:
            out [T, H], T as in that dispatch; tokens without experts are zero.

        Raises: as `dispatch`.
        """
        if not isinstance(handle, Handle):
            self._engine.refuse_handle(handle)
        refuse_replicated_experts(self, y)
        if out is not None:
            return ops.combine_out(y, recv_weights, handle.recv_plan, handle.send_plan, self._engine, handle.tag, out)
        return ops.combine(y, recv_weights, handle.recv_plan, handle.send_plan, self._engine, handle.tag)

    def refuse(self, error: InvalidInput, *, tag: int = 0) -> NoReturn:
        """In place of a dispatch whose input is wrong: raises `error`, and InvalidInput on every peer. Collective."""
        self._engine._refuse(Op.DISPATCH, tag, error, 0, 0)

    def new_tag(self) -> int:
        """A layer tag that this buffer has not given before; layers ask for theirs in the same order on every rank."""
        self._num_tags += 1
        return self._num_tags

    def reserve_tags(self, tag: int) -> None:
        """Never gives this tag, nor a lower one, to a layer: it is that of one which did not ask here."""
        self._num_tags = max(self._num_tags, tag)

    @property
    def closed(self) -> bool:
        """True once this rank has left the group."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Leaves the group. Local and idempotent: peers that still wait for this rank raise GroupClosed."""
        if self._finalizer.detach():
            self._engine.close()

    def abort(self, error: BaseException | None = None) -> None:
        """Ends the group on every rank, for a rank that cannot go on: peers raise GroupPoisoned at once.

        CPU ranks tell their peers why: `error`, or the exception that is being handled.
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
