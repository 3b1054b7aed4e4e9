"""DeepEP V2's `ElasticBuffer`: dispatch with and without expansion, and combine in the order of topk_idx."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_rt.compat.deep_ep import home
from moe_rt.compat.deep_ep.exchange import Exchange, Received, Rows, ungraded
from moe_rt.compat.deep_ep.expand import EPHandle, columns_of, expanded, ranks_of
from moe_rt.compat.deep_ep.layout import repeats
from moe_rt.compat.deep_ep.normal import biases, first_rows
from moe_rt.compat.deep_ep.operands import invalid, parts_of, spelled, twice, wrong_ids, wrong_rows, wrong_tensor
from moe_rt.compat.deep_ep.sizes import ALIGNMENT, combine_bytes, dispatch_bytes, elastic_bytes
from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap, event_of
from moe_rt.errors import GroupClosed, InvalidConfig, InvalidInput, MoeRtError, TooManyTokens
from moe_rt.group.groups import Group, rendezvous_of

_NUM_SMS, _QPS, _HYBRID_QPS = 20, 17, 129
_SIGNAL_HIDDEN = 8  # elements of a barrier's row, which nobody sends
_TORCH = "torch.distributed, whose groups run on CPU ranks too"


class ElasticBuffer:
    """Communication buffer of one expert-parallel group, with the methods of DeepEP V2's class of this name.

    An op is complete when it returns: CPU ranks have no streams. Rows are always in the order source rank, token, and
    within an expanded expert too. Wrong operands raise on every rank.

    Args:
        group: a torch process group, or any other group that moe_rt.Buffer takes.
        num_bytes: DeepEP's size; None: as get_buffer_size_hint. An op that DeepEP would refuse for it is refused.
        num_max_tokens_per_rank: default of dispatch, identical on every rank.
        hidden, num_topk, use_fp8_dispatch: sizes for num_bytes=None.
        deterministic, allow_hybrid_mode, prefer_overlap_with_compute, sl_idx: accepted, without effect.
        allow_multiple_reduction: in expand mode, add the rows of a token on each rank first and round the sum.
        num_allocated_qps: an attribute; 0: DeepEP's default.
        num_cpu_timeout_secs: seconds to wait for a peer.
        explicitly_destroy: require `destroy()`; otherwise the buffer closes when it is garbage.

    Raises:
        InvalidConfig: num_cpu_bytes was given, or neither num_bytes nor the sizes.
    """

    def __init__(
        self, group: Group, num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
        hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        if num_cpu_bytes:
            raise InvalidConfig(f"num_cpu_bytes: got {num_cpu_bytes}, expected 0: there is no Engram storage")
        self.group, self.explicitly_destroy, self.deterministic = group, explicitly_destroy, deterministic
        self._exchange = Exchange(group, float(num_cpu_timeout_secs))
        self.rank_idx, self.num_ranks = self._exchange.rank, self._exchange.num_ranks
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_bytes = num_bytes if num_bytes is not None else elastic_bytes(
            self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
        )  # fmt: skip
        if self.num_bytes <= 0 or self.num_bytes % ALIGNMENT:
            raise InvalidConfig(f"num_bytes: got {num_bytes}, expected a positive multiple of {ALIGNMENT}")
        self.num_allocated_qps = num_allocated_qps or (_HYBRID_QPS if allow_hybrid_mode else _QPS)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self._destroyed = False
        self._rows: Rows | None = None  # of the last dispatch, through whose buffer peers learn of a refusal

    def destroy(self) -> None:
        """Close the buffer. Local and idempotent. Raises InvalidInput if it was made with explicitly_destroy=False."""
        if not self.explicitly_destroy:
            expected = "an ElasticBuffer made with explicitly_destroy=True"
            raise invalid(self.rank_idx, "destroy", "explicitly_destroy=False", expected)
        self._destroyed = True
        self._exchange.close()

    @staticmethod
    def get_buffer_size_hint(
        group: Group, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """Return the num_bytes that DeepEP recommends for ranks of one domain."""
        num_ranks = rendezvous_of(group).size
        return elastic_bytes(
            num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
        )

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return 1 and the number of ranks: all are in one domain."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return 1 and the number of ranks: all are in one domain."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *arguments: Any, **keywords: Any) -> int:
        """Return an even number. It tunes nothing on CPU ranks."""
        return _NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return the number of queues that DeepEP would use. It tunes nothing on CPU ranks."""
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def get_comm_stream(self) -> Any:
        """Return the current stream, on which ops run. CPU ranks have none: InvalidConfig."""
        if not torch.cuda.is_initialized():
            raise InvalidConfig("get_comm_stream: got a buffer of CPU ranks, which have no streams; expected no call")
        return torch.cuda.current_stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Return when every rank has called it. Collective."""
        self._require_open()
        rows = Rows("tokens", _SIGNAL_HIDDEN, 1, self.num_ranks, torch.bfloat16)
        none = torch.empty(0, 1, device=self._exchange.buffer(rows, 0, None).device)
        self._exchange.dispatch(rows, none.new_empty(0, _SIGNAL_HIDDEN, dtype=torch.bfloat16), none.long(), none)

    @ungraded
    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None, do_handle_copy: bool = True, do_cpu_sync: bool | None = None,
        do_expand: bool = False, do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:  # fmt: skip
        """Send each token once to each rank of its experts, and expand it there to a row for each expert. Collective.

        Args:
            x: bfloat16 [T, H], or 1-byte codes [T, H] with float32 or int32 scales [T, S].
            topk_idx, topk_weights: int64 and float32 [T, K]; None with a handle, which repeats its routing. Weights
                are optional, with a handle too.
            cumulative_local_expert_recv_stats: int32 [L], to which the received counts are added.
            num_experts, num_max_tokens_per_rank, expert_alignment: identical on every rank; None: the handle's, the
                constructor's, and 1.
            do_cpu_sync: read counts on the host and return exactly the received rows. False: the worst case.
            do_expand: return a row for each received token and local expert, grouped by expert.
            do_zero_padding: with do_expand, make padding rows and their weights zero.
            use_tma_aligned_col_major_sf: return scales whose columns are contiguous.

        Returns:
            Rows [N, H], or of the expanded layout, with scales if x has them; int64 [N, K], this rank's expert ids or
            -1 (None with do_expand); float32 weights [N, K], 0 where the id is -1, or [rows] with do_expand; the
            handle; the event.

        Raises:
            MoeRtError: see moe_rt.Buffer.dispatch. Wrong operands raise InvalidInput on every rank.
        """
        self._require_open()
        sizes = (num_experts, num_max_tokens_per_rank, expert_alignment, do_expand)
        error: MoeRtError | None = self._wrong_handle(handle, topk_idx, do_cpu_sync, sizes)
        align = 1 if expert_alignment is None else expert_alignment
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        if isinstance(handle, EPHandle) and error is None:
            topk_idx, num_experts, align = handle.topk_idx, handle.num_experts, handle.expert_alignment
            most = handle.num_max_tokens_per_rank
        error = error or self._problem(x, topk_idx, topk_weights, num_experts, most, align)
        error = error or self._wrong_options(cumulative_local_expert_recv_stats, num_experts, do_expand,
                                             do_zero_padding, previous_event, allocate_on_comm_stream)  # fmt: skip
        if error is not None:
            counts = (len(parts_of(x)[0]), most) if isinstance(error, TooManyTokens) else ()
            self._exchange.refuse(self._rows, error, *counts)
        assert topk_idx is not None
        assert num_experts is not None
        hidden = parts_of(x)[0].shape[1]
        rows = self._rows = Rows("tokens", hidden, topk_idx.shape[1], num_experts, torch.bfloat16)
        weights = torch.zeros(topk_idx.shape, device=topk_idx.device) if topk_weights is None else topk_weights
        received = self._exchange.dispatch(rows, x, topk_idx, weights, most)
        if handle is None:
            kept = topk_idx.clone() if do_handle_copy else topk_idx
            handle = EPHandle(self, kept, num_experts, align, most, num_sms or _NUM_SMS, do_expand)
            handle.fill(received, self.num_ranks, do_cpu_sync is not False)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        recv_x, ids, recv_weights = _results(received, handle, do_zero_padding, use_tma_aligned_col_major_sf)
        event = event_of(async_with_compute_stream, recv_x)
        return recv_x, ids, None if topk_weights is None else recv_weights, handle, event

    @ungraded
    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None, num_sms: int = 0, num_qps: int = 0,
        previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        """Add the rows of each token, without weights, in the order of its topk_idx. Collective.

        A rank's rows of a token are added there first and rounded, unless the handle is of expand mode and
        allow_multiple_reduction=False; the sum stands at the last entry that names the rank. fp32, rounded once.

        Args:
            x: bfloat16 [N, H] or the expanded rows, as dispatch returned them.
            topk_weights: float32 [N, K], or [rows] in expand mode, which return to their entries.
            bias: one or two bfloat16 [T, H], with which the sum begins.

        Returns:
            bfloat16 [T, H]; float32 [T, K], 0 where topk_idx is -1, or None; the event.
        """
        self._require_open()
        error = self._unfit(x, handle, topk_weights, biases(bias))
        error = error or self._wrong_options(None, None, True, False, previous_event, allocate_on_comm_stream)
        if error is not None:
            self._exchange.refuse(self._rows and home.size_of(self._rows.hidden, self.num_ranks), error)
        ranks = ranks_of(handle.topk_idx, handle.num_experts, self.num_ranks)
        slots = handle.slots
        sources = home.sources_of(handle.recv_src_metadata, handle.num_max_tokens_per_rank, handle.there)
        first = sum((part.float() for part in biases(bias)[1:]), biases(bias)[0].float()) if biases(bias) else None
        if handle.do_expand and not self.allow_multiple_reduction:  # every row travels
            slots = home.in_front(slots, handle.num_experts // self.num_ranks)
            sources = sources.where(slots >= 0, -1).view(-1, 1)
            rows = home.send_home(self._exchange, x, slots.clamp(min=0).flatten(), sources).x
            total = home.add_in_order(rows, home.places_at_home(ranks), first)
            return total.to(x.dtype), None, event_of(async_with_compute_stream, total)
        if handle.do_expand:
            x = home.add_in_order(x, home.in_front(slots, handle.num_experts // self.num_ranks)).to(x.dtype)
        order = home.last_entries(ranks, self.num_ranks)
        rows = home.send_home(self._exchange, x, None, sources).x
        out = home.add_in_order(rows, home.places_at_home(order), first).to(x.dtype)
        weights = None if topk_weights is None else self._weights_home(topk_weights, handle, sources, ranks, order)
        return out, weights, event_of(async_with_compute_stream, out)

    def _weights_home(self, weights: Tensor, handle: EPHandle, sources: Tensor, ranks: Tensor, order: Tensor) -> Tensor:
        """Return float32 [T, K]: the weight that each entry's rank gave it. Collective."""
        num_topk = ranks.shape[1]
        if handle.do_expand:
            weights = torch.nn.functional.pad(weights, (0, 1))[handle.slots]  # -1 is the appended zero
        rows = home.send_weights_home(self._exchange, weights, sources).x
        places = home.places_at_home(order)
        column = (order.unsqueeze(1) == ranks.unsqueeze(2)).int().argmax(2)  # of each entry's rank in `order`
        place = places.gather(1, column).masked_fill(ranks < 0, -1)
        entries = torch.arange(num_topk, device=ranks.device)
        return rows[place.clamp(min=0), entries].where(place >= 0, 0)

    def _require_open(self) -> None:
        if self._destroyed:
            raise GroupClosed(f"rank {self.rank_idx}: got an op on a destroyed ElasticBuffer, expected a living one")

    def _wrong_handle(
        self, handle: Any, topk_idx: Tensor | None, do_cpu_sync: bool | None, sizes: tuple[Any, ...]
    ) -> InvalidInput | None:
        if handle is None:
            return None
        if not isinstance(handle, EPHandle) or handle.owner is not self:
            expected = "one that this buffer's dispatch returned"
            return invalid(self.rank_idx, "handle", f"another buffer's, or {spelled(handle)}", expected)
        if topk_idx is not None or do_cpu_sync:
            expected = "neither topk_idx nor do_cpu_sync=True with a handle"
            return invalid(self.rank_idx, "topk_idx", f"{spelled(topk_idx)}, do_cpu_sync={do_cpu_sync}", expected)
        own = (handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment, handle.do_expand)
        if any(a is not None and a != b for a, b in zip(sizes, own, strict=True)):
            names = "(num_experts, num_max_tokens_per_rank, expert_alignment, do_expand)"
            return invalid(self.rank_idx, names, sizes, f"None, or the handle's {own}")
        return None

    def _problem(
        self, x: Any, topk_idx: Any, weights: Any, num_experts: int | None, most: int, align: int
    ) -> MoeRtError | None:
        """Return the error of a dispatch's tensors, None if DeepEP's contract holds."""
        if error := wrong_rows(self.rank_idx, x):
            return error
        codes, scales = parts_of(x)
        num_tokens = len(codes)
        if type(num_experts) is not int or num_experts < 1 or num_experts % self.num_ranks:
            return invalid(self.rank_idx, "num_experts", num_experts, f"a multiple of {self.num_ranks} ranks")
        if type(most) is not int or most < 1 or type(align) is not int or align < 1:
            names = "num_max_tokens_per_rank, expert_alignment"
            return invalid(self.rank_idx, names, (most, align), "positive numbers")
        error = wrong_ids(self.rank_idx, topk_idx, num_tokens, codes)
        if error is None and weights is not None:
            error = wrong_tensor(self.rank_idx, "topk_weights", weights, torch.float32, topk_idx.shape, codes)
        if error is not None:
            return error
        if num_tokens > most:
            message = f"x: got {num_tokens} tokens, expected at most num_max_tokens_per_rank = {most}"
            return TooManyTokens(f"rank {self.rank_idx}: {message}", rank=self.rank_idx)
        if topk_idx.is_cpu and repeats(topk_idx):
            return twice(self.rank_idx)
        num_scales = 0 if scales is None else scales.shape[1]
        return self._too_small(
            dispatch_bytes(self.num_ranks, most, codes.shape[1] * codes.itemsize, num_scales, topk_idx.shape[1])
        )

    def _too_small(self, needed: int) -> InvalidInput | None:
        if needed <= self.num_bytes:
            return None
        expected = f"at least {needed}, as DeepEP needs (get_buffer_size_hint)"
        return invalid(self.rank_idx, "num_bytes", self.num_bytes, expected)

    def _wrong_options(
        self, stats: Tensor | None, num_experts: int | None, do_expand: bool, do_zero_padding: bool,
        previous_event: Any, allocate_on_comm_stream: bool,
    ) -> InvalidInput | None:  # fmt: skip
        if do_zero_padding and not do_expand:
            return invalid(self.rank_idx, "do_zero_padding", True, "do_expand=True with it")
        if previous_event is not None and not allocate_on_comm_stream:
            return invalid(self.rank_idx, "previous_event", "an event", "allocate_on_comm_stream=True with it")
        if stats is not None and num_experts is not None:
            size = [num_experts // self.num_ranks]
            if stats.dtype is not torch.int32 or list(stats.shape) != size:
                return invalid(self.rank_idx, "cumulative_local_expert_recv_stats", spelled(stats), f"int32 {size}")
        return None

    def _unfit(self, x: Any, handle: Any, weights: Any, bias: tuple[Tensor, ...]) -> InvalidInput | None:
        """Return the error of a combine's arguments, None if DeepEP's contract holds."""
        if not isinstance(handle, EPHandle) or handle.owner is not self:
            expected = "one that this buffer's dispatch returned"
            return invalid(self.rank_idx, "handle", f"another buffer's, or {spelled(handle)}", expected)
        num_topk, expected = handle.topk_idx.shape[1], f"contiguous bfloat16 [{handle.num_rows}, H], H of 8 n"
        if not isinstance(x, Tensor) or x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous():
            return invalid(self.rank_idx, "x", spelled(x), expected)
        if len(x) != handle.num_rows or x.shape[1] % 8:
            return invalid(self.rank_idx, "x", spelled(x), expected)
        if weights is not None and handle.do_expand and not self.allow_multiple_reduction:
            return invalid(self.rank_idx, "topk_weights", spelled(weights), "None without allow_multiple_reduction")
        shape = [handle.num_rows] if handle.do_expand else [handle.num_rows, num_topk]
        if weights is not None and (
            not isinstance(weights, Tensor) or weights.dtype is not torch.float32 or list(weights.shape) != shape
        ):
            return invalid(self.rank_idx, "topk_weights", spelled(weights), f"float32 {shape}")
        size = [len(handle.topk_idx), x.shape[1]]
        for part in bias:
            if not isinstance(part, Tensor) or part.dtype is not x.dtype or list(part.shape) != size:
                return invalid(self.rank_idx, "bias", spelled(part), f"{x.dtype} {size}")
        most, several = handle.num_max_tokens_per_rank, self.allow_multiple_reduction
        return self._too_small(combine_bytes(self.num_ranks, most, x.shape[1], num_topk, several))


def _results(received: Received, handle: EPHandle, zero: bool, columns: bool) -> tuple[Any, Tensor | None, Tensor]:
    """Return a dispatch's rows, expert ids and weights in the layout of the handle."""
    num_rows, num_topk = len(handle.slots), handle.topk_idx.shape[1]
    parts = [first_rows(part, num_rows) for part in (received.x if type(received.x) is tuple else (received.x,))]
    weights = first_rows(received.weights, num_rows)
    ids: Tensor | None = None
    if handle.do_expand:
        of = expanded(handle)
        parts = [part[of.entries // num_topk] for part in parts]
        weights = weights.flatten()[of.entries]
        if zero:
            for part in (*parts, weights):
                part.view(torch.uint8 if part.itemsize == 1 else part.dtype)[~of.real] = 0
    else:
        ids = first_rows(received.ids, num_rows).where(handle.there.unsqueeze(1), -1).long()
    if len(parts) == 1:
        return parts[0], ids, weights
    return (parts[0], columns_of(parts[1]) if columns else parts[1]), ids, weights


def _add_refusals() -> None:
    """Give ElasticBuffer the names of DeepEP's experiments, each of which raises InvalidConfig."""
    others = {
        "engram": ("engram_write", "engram_fetch", "get_engram_storage_size_hint"),
        "pp": ("pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint"),
        "agrs": (
            "create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config", "all_gather",
            "agrs_get_inplace_tensor", "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint",
        ),
    }  # fmt: skip
    for names in others.values():
        for name in names:
            setattr(ElasticBuffer, name, staticmethod(_refusal(name)))


def _refusal(name: str) -> Any:
    def refuse(*arguments: Any, **keywords: Any) -> NoReturn:
        raise InvalidConfig(f"ElasticBuffer.{name}: got a call, expected {_TORCH}")

    refuse.__name__, refuse.__doc__ = name, f"Raise InvalidConfig: use {_TORCH}."
    return refuse


_add_refusals()
