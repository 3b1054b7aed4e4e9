"""Dispatch and combine of DeepEP's normal mode: each token visits a rank once, and the host learns how many came."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.compat.deep_ep import home
from moe_rt.compat.deep_ep.config import NVL_PEERS, Config
from moe_rt.compat.deep_ep.exchange import Exchange, Rows
from moe_rt.compat.deep_ep.layout import KnownLayout, Layout, differs, layout_of, local_ids, per_domain, source_tokens
from moe_rt.compat.deep_ep.operands import invalid, parts_of, spelled, twice, wrong_ids, wrong_rows, wrong_tensor
from moe_rt.errors import InvalidInput, MoeRtError

_ITEMS, _ITEMS_OF_DOMAINS = 6, 10  # of DeepEP's handles


class DispatchHandle(Sequence[Any]):
    """Routing of one dispatch. Its items are those of DeepEP's handle, computed when they are read.

    Six items up to 8 ranks: rank_prefix_matrix int32 [R, R], of which only this rank's column is known and the others
    are -1; two empty tensors for DeepEP's channels; recv_src_idx int32 [N], the source's token of each row;
    is_token_in_rank bool [T, R]; and an empty tensor for DeepEP's queues. Ten items for several domains of 8 ranks, of
    which is_token_in_rank (0), recv_rdma_rank_prefix_sum (4), recv_gbl_rank_prefix_sum (6) and the source's tokens (7)
    are known and the others empty.
    """

    def __init__(self, owner: Normal, routing: tuple[Tensor, Tensor], in_rank: Tensor, num_rows: int) -> None:
        self.owner, self.routing, self.in_rank, self.num_rows = owner, routing, in_rank, num_rows
        self.plans: dict[int, tuple[Rows, Buffer, Handle]] = {}  # by the elements of a row

    @property
    def rows(self) -> Rows:
        """Size and routing of the rows of the first dispatch."""
        return next(iter(self.plans.values()))[0]

    @property
    def plan(self) -> Handle:
        """Plan of the first dispatch."""
        return next(iter(self.plans.values()))[2]

    def _items(self) -> Iterator[Tensor]:
        plan = self.plan
        rank, num_ranks = self.owner.rank, self.owner.num_ranks
        prefix = plan.offs.new_full((num_ranks, num_ranks), -1)
        prefix[:, rank] = plan.offs
        none, delivered = plan.offs.new_empty(0), int(plan.offs[-1])
        source = plan.offs.new_full((self.num_rows,), -1)
        source[:delivered] = source_tokens(plan, delivered)
        if len(self) == _ITEMS:
            yield from (prefix, none, none, source, self.in_rank, none)
        else:
            domains = plan.offs[NVL_PEERS - 1 :: NVL_PEERS].clone()
            yield from (self.in_rank, none, none, none, domains, none, plan.offs, source, none, none)

    def __len__(self) -> int:
        return _ITEMS if per_domain(self.in_rank[:0]) is None else _ITEMS_OF_DOMAINS

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._items())[index]

    def __iter__(self) -> Iterator[Any]:
        return self._items()


class Normal:
    """Normal mode of one deep_ep.Buffer."""

    def __init__(self, exchange: Exchange, num_nvl_bytes: int) -> None:
        self._exchange, self._num_nvl_bytes = exchange, num_nvl_bytes
        self.rank, self.num_ranks = exchange.rank, exchange.num_ranks
        self.known = KnownLayout()
        self._latest: Rows | None = None  # of the last dispatch, through whose buffer peers learn of a refusal

    def dispatch(
        self, x: Any, topk_idx: Tensor | None, topk_weights: Tensor | None, layout: Layout,
        domains: Tensor | None, alignment: int, num_worst: int, config: Config,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int], DispatchHandle]:  # fmt: skip
        """Return received rows, their expert ids and weights, the number of rows of each expert, and the handle."""
        error = self._problem(x, topk_idx, topk_weights, layout, num_worst, config)
        if error is None and domains is not None:
            error = self._wrong_domains(domains, layout)
        if error is not None:
            self._exchange.refuse(self._latest, error)
        rows = self._latest = self._rows(x, topk_idx, layout)
        if topk_idx is None:
            routing = self._routing_by_rank(layout.in_rank)
        else:
            assert topk_weights is not None
            routing = topk_idx.clone(), topk_weights.detach() if topk_weights.requires_grad else topk_weights
        received = self._exchange.dispatch(rows, x, *routing)
        handle = DispatchHandle(self, routing, layout.in_rank, num_worst)
        handle.plans[rows.hidden] = rows, received.buffer, received.handle
        if num_worst:
            return (*self._worst_case(received, num_worst), [], handle)
        num_rows = handle.num_rows = received.handle.offs.tolist()[-1]
        recv_x = tuple(part[:num_rows] for part in received.x) if type(x) is tuple else received.x[:num_rows]
        if topk_idx is None:
            return recv_x, None, None, self._counts(layout.per_expert, alignment), handle
        sizes = num_rows, topk_idx.shape[1], rows.num_experts // self.num_ranks
        ids, counts = local_ids(received.handle.recv_plan, received.buffer._engine.ids_at, *sizes, alignment)
        return recv_x, ids, received.weights[:num_rows], counts, handle

    def again(self, x: Any, handle: DispatchHandle, config: Config) -> Any:
        """Return the rows of x, routed as in the dispatch of the handle."""
        error = self._wrong_rows(x, handle.in_rank.shape[0], config, 0) if handle.owner is self else self._foreign()
        if error is not None:
            self._exchange.refuse(handle.rows if handle.owner is self else None, error)
        rows = handle.rows._replace(hidden=(x[0] if type(x) is tuple else x).shape[1])
        received = self._exchange.dispatch(rows, x, *handle.routing)
        handle.plans[rows.hidden] = rows, received.buffer, received.handle
        if type(x) is tuple:
            return tuple(first_rows(part, handle.num_rows) for part in received.x)
        return first_rows(received.x, handle.num_rows)

    def combine(
        self, x: Tensor, handle: DispatchHandle, topk_weights: Tensor | None, bias: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of x over the ranks of each token, plus the biases, and the same sum of topk_weights."""
        error = self._unfit(x, handle, topk_weights, bias)
        if error is not None:
            self._refuse_combine(handle, bool(bias), error)
        _, buffer, plan = handle.plans.get(x.shape[1], (None, None, None))
        sources = None
        if bias or buffer is None or plan is None:
            sources = home.source_ranks(handle.plan.offs, handle.num_rows)
            first = sum((part.float() for part in bias[1:]), bias[0].float()) if bias else None
            rows = home.send_home(self._exchange, x, None, sources).x
            out = home.add_in_order(rows, self._places(handle), first).to(x.dtype)
        else:
            engine = buffer._engine  # as Exchange.dispatch
            y = x[: engine.capacity]  # the worst case may have more rows
            out = engine.combine(y, None, plan.recv_plan, plan.send_plan, 0)
        if topk_weights is None:
            return out, None
        if sources is None:
            sources = home.source_ranks(handle.plan.offs, handle.num_rows)
        returned = home.send_weights_home(self._exchange, topk_weights, sources)
        return out, home.add_weights(returned, handle.in_rank, topk_weights.shape[1])

    def _refuse_combine(self, handle: Any, bias: bool, error: MoeRtError) -> NoReturn:
        """Raise the error on every rank, in the buffer through which peers combine."""
        own = isinstance(handle, DispatchHandle) and handle.owner is self
        rows = handle.rows if own else self._latest
        buffer = self._exchange.of(rows)
        if bias and rows is not None:
            self._exchange.refuse(home.size_of(rows.hidden, self.num_ranks), error)
        if buffer is None:
            raise error
        self._exchange.refuse_combine(buffer, error)

    def _places(self, handle: DispatchHandle) -> Tensor:
        """Return int64 [T, J]: where the rows of each token arrive at home, in rank order."""
        ranks = torch.arange(self.num_ranks, device=handle.in_rank.device)
        return home.in_front(home.places_at_home(torch.where(handle.in_rank, ranks, -1)), handle.rows.num_topk)

    def _rows(self, x: Any, topk_idx: Tensor | None, layout: Layout) -> Rows:
        hidden, latest = (x[0] if type(x) is tuple else x).shape[1], self._latest
        num_topk, num_experts = self.num_ranks, self.num_ranks
        if topk_idx is not None:
            num_topk, num_experts = topk_idx.shape[1], layout.per_expert.shape[0]
        if latest is not None and latest[1:4] == (hidden, num_topk, num_experts):
            return latest
        return Rows("tokens", hidden, num_topk, num_experts, torch.bfloat16)

    def _routing_by_rank(self, in_rank: Tensor) -> tuple[Tensor, Tensor]:
        """Return a routing over one expert per rank that visits the same ranks, and its weights."""
        ranks = torch.arange(self.num_ranks, device=in_rank.device)
        return torch.where(in_rank, ranks, -1), torch.ones(in_rank.shape, device=in_rank.device)

    def _counts(self, per_expert: Tensor, alignment: int) -> list[int]:
        """Return the sum of all ranks' counts for each local expert, rounded up to the alignment. Collective."""
        num_local = len(per_expert) // self.num_ranks
        wide = -(-num_local // 4) * 4
        parts = torch.nn.functional.pad(per_expert.view(self.num_ranks, num_local), (0, wide - num_local))
        ranks = torch.arange(self.num_ranks, device=per_expert.device).unsqueeze(1)
        rows = Rows("experts", wide, 1, self.num_ranks, torch.float32)
        received = self._exchange.dispatch(rows, parts.view(torch.float32), ranks, torch.ones_like(ranks).float())
        counts: list[int] = received.x[: self.num_ranks].view(torch.int32).sum(0)[:num_local].tolist()
        return [-(-count // alignment) * alignment for count in counts]

    @staticmethod
    def _worst_case(received: Any, num_worst: int) -> tuple[Any, Tensor, Tensor]:
        """Return num_worst rows, ids and weights; ids of rows that were not received are -1. Reads no count."""
        ids = received.ids
        there = torch.arange(min(len(ids), num_worst), device=ids.device) < received.handle.offs[-1]
        recv_ids = ids.new_full((num_worst, ids.shape[1]), -1, dtype=torch.int64)
        recv_ids[: len(there)] = ids[: len(there)].where(there.unsqueeze(1), -1)
        parts = received.x if isinstance(received.x, tuple) else (received.x,)
        recv = tuple(first_rows(part, num_worst) for part in parts)
        return recv if len(recv) > 1 else recv[0], recv_ids, first_rows(received.weights, num_worst)

    def _foreign(self) -> InvalidInput:
        return invalid(
            self.rank, "handle", "another buffer's, or a copy of its items", "one that this buffer's dispatch returned"
        )

    def _problem(
        self, x: Any, topk_idx: Tensor | None, topk_weights: Tensor | None, layout: Layout, num_worst: int,
        config: Config,
    ) -> MoeRtError | None:  # fmt: skip
        """Return the error of a dispatch's arguments, None if DeepEP's contract holds."""
        codes, _ = parts_of(x)
        num_tokens = codes.shape[0] if isinstance(codes, Tensor) and codes.dim() else -1
        num_topk = topk_idx.shape[1] if isinstance(topk_idx, Tensor) and topk_idx.dim() == 2 else 0
        if error := self._wrong_rows(x, num_tokens, config, num_topk):
            return error
        known = self.known.knows(topk_idx, layout) and layout.in_rank.shape[0] == num_tokens
        if not known and (error := self._wrong_counts(layout, codes)):
            return error
        if (topk_idx is None) is not (topk_weights is None):
            return invalid(
                self.rank, "topk_weights", spelled(topk_weights), "both topk_idx and topk_weights, or neither"
            )
        if topk_idx is None:
            if num_worst:
                return invalid(self.rank, "num_worst_tokens", num_worst, "topk_idx and topk_weights with it")
            return self._wrong_layout(None, layout)
        error = None if known else wrong_ids(self.rank, topk_idx, num_tokens, codes)
        shape = (num_tokens, num_topk)
        if error := error or wrong_tensor(self.rank, "topk_weights", topk_weights, torch.float32, shape, codes):
            return error
        if (
            num_worst
            and num_worst < self.num_ranks * num_tokens
            and num_worst < int(layout.in_rank[:, self.rank].sum())
        ):
            return invalid(self.rank, "num_worst_tokens", num_worst, "at least the number of received tokens")
        return None if known or not differs(topk_idx, layout) else self._wrong_layout(topk_idx, layout)

    def _wrong_rows(self, x: Any, num_tokens: int, config: Config, num_topk: int) -> InvalidInput | None:
        if error := wrong_rows(self.rank, x, num_tokens):
            return error
        codes, scales = parts_of(x)
        num_scales = 0 if scales is None else scales.shape[1]
        needed = config.nvl_bytes(self.num_ranks, codes.shape[1] * codes.itemsize, num_topk, num_scales)
        if needed <= self._num_nvl_bytes:
            return None
        return invalid(self.rank, "num_nvl_bytes", self._num_nvl_bytes, f"{needed}, as DeepEP needs for this config")

    def _wrong_counts(self, layout: Layout, x: Tensor) -> InvalidInput | None:
        num_experts = len(layout.per_expert) if isinstance(layout.per_expert, Tensor) else 0
        visits = len(x), self.num_ranks
        if error := (
            wrong_tensor(self.rank, "num_tokens_per_rank", layout.per_rank, torch.int32, visits[1:], x)
            or wrong_tensor(self.rank, "num_tokens_per_expert", layout.per_expert, torch.int32, (num_experts,), x)
            or wrong_tensor(self.rank, "is_token_in_rank", layout.in_rank, torch.bool, visits, x)
        ):
            return error
        if not num_experts or num_experts % self.num_ranks:
            expected = f"a multiple of {self.num_ranks} ranks"
            return invalid(self.rank, "num_tokens_per_expert", f"{num_experts} experts", expected)
        return None

    def _wrong_domains(self, given: Tensor | None, layout: Layout) -> InvalidInput | None:
        """Return the error of counts of domains, which are optional here."""
        if given is None or (right := per_domain(layout.in_rank)) is None:
            return None
        if not isinstance(given, Tensor) or given.shape != right.shape or not torch.equal(given.int(), right):
            return invalid(self.rank, "num_tokens_per_rdma_rank", spelled(given), f"{right.tolist()}")
        return None

    def _wrong_layout(self, topk_idx: Tensor | None, layout: Layout) -> MoeRtError | None:
        """Return the error of counts that do not belong to the routing. It reads them on the host."""
        num_experts = len(layout.per_expert)
        per_rank = layout.in_rank.sum(0, dtype=torch.int32)
        if not torch.equal(per_rank, layout.per_rank):
            expected = f"{per_rank.tolist()}, the columns' sums of is_token_in_rank"
            return invalid(self.rank, "num_tokens_per_rank", layout.per_rank.tolist(), expected)
        if topk_idx is None:
            return None
        own = layout_of(topk_idx, num_experts, self.num_ranks)
        if not torch.equal(own.in_rank, layout.in_rank):
            return invalid(self.rank, "is_token_in_rank", "another routing's", "that of topk_idx (get_dispatch_layout)")
        if not torch.equal(own.per_expert, layout.per_expert):
            return invalid(self.rank, "num_tokens_per_expert", "another routing's", "that of topk_idx")
        return twice(self.rank)

    def _unfit(self, x: Any, handle: Any, topk_weights: Tensor | None, bias: Sequence[Tensor]) -> InvalidInput | None:
        if not isinstance(handle, DispatchHandle) or handle.owner is not self:
            return self._foreign()
        shape, num_tokens = [handle.num_rows], handle.in_rank.shape[0]
        if not isinstance(x, Tensor) or x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous():
            return invalid(self.rank, "x", spelled(x), f"contiguous bfloat16 {[*shape, 'H']}")
        if x.shape[0] != handle.num_rows or x.shape[1] % 8:
            return invalid(self.rank, "x", spelled(x), f"bfloat16 {[*shape, 'H']}, H a multiple of 8")
        if topk_weights is not None and (
            not isinstance(topk_weights, Tensor) or topk_weights.dtype is not torch.float32
            or topk_weights.dim() != 2 or topk_weights.shape[0] != handle.num_rows or not topk_weights.is_contiguous()
            or topk_weights.device != x.device
        ):  # fmt: skip
            return invalid(self.rank, "topk_weights", spelled(topk_weights), f"contiguous float32 {[*shape, 'K']}")
        for part in bias:
            if (
                not isinstance(part, Tensor) or part.dtype is not x.dtype or part.shape != (num_tokens, x.shape[1])
                or part.device != x.device
            ):  # fmt: skip
                return invalid(self.rank, "bias", spelled(part), f"{x.dtype} {[num_tokens, x.shape[1]]}")
        return None


def first_rows(t: Tensor, num_rows: int) -> Tensor:
    """Return the first rows; if there are fewer, they are followed by unspecified ones."""
    if len(t) >= num_rows:
        return t[:num_rows]
    return torch.cat([t, t.new_empty(num_rows - len(t), *t.shape[1:])])


def biases(bias: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Return zero, one or two biases, as DeepEP takes them, as a tuple."""
    return () if bias is None else tuple(itertools.chain(bias)) if isinstance(bias, (tuple, list)) else (bias,)
