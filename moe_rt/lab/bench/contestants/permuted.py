"""Dispatch by permuted rows and all-to-all, as in Megatron-LM and torchtitan, in the fastest form that torch has.

dispatch: sort the (token, expert) pairs by expert, exchange counts, read them on the host, gather rows in that order,
all-to-all, and reorder blocks from (source, expert) to (expert, source). combine: the reverse, then a weighted sum of
each token's rows. One row is sent for every (token, expert) pair. The transport is torch.distributed or MPI.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_rt.extras import how_to_install
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Delivery, Exchange, Unavailable, require_processes
from moe_rt.lab.bench.world import World


class _State(NamedTuple):
    order: Tensor  # [T * K], the pair of every row that this rank sent
    weights: Tensor  # [T, K] in the payload dtype
    send: list[int]  # rows to and from each rank
    recv: list[int]
    blocks: list[tuple[int, int, int]]  # (local expert, source rank, rows) as received, without empty blocks


class Permuted(Exchange):
    """The exchange, except the transport."""

    unit = "expert"

    def __init__(self, case: Case, world: World) -> None:
        super().__init__(case, world)
        self._ends = [0, *accumulate(case.local_experts)]
        self._num_local = case.local_experts[world.rank]

    @abstractmethod
    def exchange_counts(self, counts: Tensor) -> Tensor:
        """int64 [E] rows for every expert -> [R * L] rows from every source for every local expert."""

    @abstractmethod
    def exchange_rows(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        """[sum(send), H] -> [sum(recv), H], both in the order of ranks."""

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        pairs = topk_idx.view(-1)
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=self.case.experts)
        incoming = self.exchange_counts(counts)
        both = torch.cat((counts, incoming)).tolist()  # a GPU rank's host waits for it, once
        outgoing, received = both[: len(counts)], both[len(counts) :]
        n = self._num_local
        send = [sum(outgoing[a:b]) for a, b in zip(self._ends, self._ends[1:], strict=False)]
        recv = [sum(received[a : a + n]) for a in range(0, len(received), n)]
        blocks = [(i % n, i // n, rows) for i, rows in enumerate(received) if rows]
        rows = self._exchange(x.index_select(0, order // self.case.topk), send, recv)
        offs = incoming.view(-1, n).sum(0).cumsum(0).to(torch.int32)
        state = _State(order, topk_weights.to(x.dtype), send, recv, blocks)
        return Delivery(_reorder(rows, blocks, sorted(blocks)), offs, state)

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        state: _State = delivery.state
        home = self._exchange(_reorder(y, sorted(state.blocks), state.blocks), state.recv, state.send)
        position = torch.empty_like(state.order)
        position[state.order] = torch.arange(len(position), device=position.device)
        # One pass over the rows, forward and backward: faster on CPU ranks than bmm or sum over gathered rows.
        position = position.view(-1, self.case.topk)
        return F.embedding_bag(position, home, per_sample_weights=state.weights, mode="sum")

    def _exchange(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        if not torch.is_grad_enabled():
            return self.exchange_rows(rows, send, recv)
        exchanged: Tensor = _ExchangeFunction.apply(rows, self, send, recv)
        return exchanged


class AllToAll(Permuted):
    """torch.distributed.all_to_all_single: on gloo for CPU ranks, on NCCL for ranks with one GPU each."""

    name = "a2a"

    def __init__(self, case: Case, world: World) -> None:
        require_processes(case)
        super().__init__(case, world)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        incoming = counts.new_empty(self._num_local * self.world.size)
        dist.all_to_all_single(incoming, counts, [self._num_local] * self.world.size, self.case.local_experts)
        return incoming

    def exchange_rows(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        incoming = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(incoming, rows, recv, send)
        return incoming


class _ExchangeFunction(torch.autograd.Function):
    """An exchange whose backward is the exchange in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Permuted, send: list[int], recv: list[int]) -> Tensor:
        ctx.exchange, ctx.send, ctx.recv = exchange, send, recv
        return exchange.exchange_rows(rows, send, recv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.exchange_rows(grads[0].contiguous(), ctx.recv, ctx.send), None, None, None


def _reorder(rows: Tensor, blocks: list[tuple[int, int, int]], target: list[tuple[int, int, int]]) -> Tensor:
    """Move whole blocks of rows from the order `blocks` to the order `target`."""
    if blocks == target:
        return rows
    pieces = dict(zip(blocks, rows.split([block[2] for block in blocks]), strict=True))
    return torch.cat([pieces[block] for block in target])


class Mpi(Permuted):
    """MPI_Alltoallv through mpi4py. The ranks must have been started by mpirun."""

    name = "mpi"

    def __init__(self, case: Case, world: World) -> None:
        if case.on_gpu or not case.as_processes:
            raise Unavailable("it moves memory of the host between processes: --heap shm or ucx")
        if not world.mpi:
            raise Unavailable(f"ranks were not started by mpirun; {how_to_install('bench')}")
        try:
            import mpi4py

            mpi4py.rc.thread_level = "single"  # no other thread calls MPI, so it needs no locks
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library was found
            raise Unavailable(f"{error}; {how_to_install('bench')}") from error
        super().__init__(case, world)
        self._comm = MPI.COMM_WORLD
        self._int64, self._row = MPI.INT64_T, MPI.BYTE.Create_contiguous(case.row_bytes).Commit()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        incoming = counts.new_empty(self._num_local * self.world.size)
        each = [self._num_local] * self.world.size
        self._comm.Alltoallv(
            [counts.numpy(), self.case.local_experts, self._int64], [incoming.numpy(), each, self._int64]
        )
        return incoming

    def exchange_rows(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        incoming = rows.new_empty(sum(recv), rows.shape[1])
        self._comm.Alltoallv([_bytes(rows), send, self._row], [_bytes(incoming), recv, self._row])
        return incoming

    def close(self) -> None:
        self._row.Free()


def _bytes(rows: Tensor) -> object:
    return rows.detach().view(torch.uint8).numpy()
