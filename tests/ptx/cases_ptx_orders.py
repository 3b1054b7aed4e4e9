"""What reaches the barriers, releases and acquires of kernels: rounds of two ranks, and ops that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from device.test_network import closes_after_its_last_op, dispatches_in_a_row
from harness import ThreadRanks
from ptx.cases_ptx_failures import ACTS, outcomes_on
from ptx.gpu import PtxGpu
from ptx.modules import ptx_of
from ptx.network import NetworkGpu
from ptx.orders import Order, orders_of
from ptx.test_ptx_failures import judge
from rounds import full_round, rounds_in_a_row
from routing import make_spec

from moe_rt.native import cuda
from moe_rt.native.launcher import NETWORK_THREADS, THREADS, kernel_defines

# Waits of each op that fail.
ACTS_APART = ("silent peer", "other op", "silent peer in backward")
# The others rewrite a peer's memory, or meet where a network has no such order.
ACTS_OVER_NETWORK = tuple(act for act in ACTS if act != "corrupt lists")


def _round(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(full_round, make_spec(2), [12, 7], 1, "random")


def _fails(act: str) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        judge(act, outcomes_on(gpu, act))

    return run


def _in_a_row(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(rounds_in_a_row, make_spec(2), [12, 7], [5, 6], "random")


def _aligned(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(full_round, make_spec(2, expert_alignment=16), [12, 7], 1, "random")


def waits_apart(case: Callable[[PtxGpu], None]) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        apart_from, cuda.WAIT_APART_FROM = cuda.WAIT_APART_FROM, 8
        try:
            case(gpu)
        finally:
            cuda.WAIT_APART_FROM = apart_from

    return run


def _two_tiles(gpu: PtxGpu) -> None:
    """One block routes both."""
    ThreadRanks(1, gpu).run(full_round, make_spec(1, num_max_tokens_per_rank=530), [530], 3, "topk")


def _over_network(case: Callable[..., Any], *args: Any) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        ThreadRanks(2, gpu).run(case, *args)

    return run


def _three_ranks(gpu: PtxGpu) -> None:
    spec = make_spec(3, placement=[e % 3 for e in range(9)])
    ThreadRanks(3, gpu).run(full_round, spec, [12, 7, 12], 1, "random")


@dataclass(frozen=True)
class Kernels:
    """What is compiled from one source, for two ranks of `spec`.

    `cases`: cheap ones first, as a mutant runs those that reach it until one notices.
    """

    source: str
    make: Callable[[], PtxGpu]
    cases: dict[str, Callable[[PtxGpu], None]]

    def ptx(self) -> str:
        return ptx_of(self.source, kernel_defines(make_spec(2), self.threads), nvshmem=self.is_network)

    @property
    def is_network(self) -> bool:
        return self.source == "kernels_rdma.cu"

    @property
    def threads(self) -> int:
        return NETWORK_THREADS if self.is_network else THREADS


NETWORK_SPEC = make_spec(2, placement=[e % 2 for e in range(9)])
KERNELS = {
    "mapped": Kernels(
        "kernels.cu",
        PtxGpu,
        {
            "a round": _round,
            "a round of aligned experts": _aligned,
            "a round that waits apart": waits_apart(_round),
            **{f"{act}, who waits apart": waits_apart(_fails(act)) for act in ACTS_APART},
            **{act: _fails(act) for act in ACTS},
            "rounds in a row": _in_a_row,
            "two tiles": _two_tiles,
        },
    ),
    "network": Kernels(
        "kernels_rdma.cu",
        partial(NetworkGpu, "every other"),
        {
            "a round": _over_network(full_round, NETWORK_SPEC, [12, 7], 1, "random"),
            "a round with a peer that is mapped": _three_ranks,
            "dispatches in a row": _over_network(dispatches_in_a_row, 1),
            "closing after an op": _over_network(closes_after_its_last_op, 1),
            **{act: _fails(act) for act in ACTS_OVER_NETWORK},
            "rounds in a row": _over_network(rounds_in_a_row, NETWORK_SPEC, [12, 7], [5, 6], "random"),
        },
    ),
}


def reached(which: str) -> dict[str, set[tuple[str, int]]]:
    """By case: entries, and lines of them."""
    gpu, found = KERNELS[which].make(), {}
    for name, case in KERNELS[which].cases.items():
        case(gpu)
        found[name] = gpu.reached()
    return found


def noticed(which: str, order: Order, names: Sequence[str]) -> str:
    """What is said without it, by the first case that notices; nothing if none does."""
    gpu = KERNELS[which].make()
    gpu.mute(order.entry, order.line)
    for name in names:
        try:
            KERNELS[which].cases[name](gpu)
        except Exception as error:  # wrong bits and wrong errors are noticed, too
            return f"{name}: {gpu.fault() or repr(error)}"
    return ""


def orders(which: str, entry: str) -> list[Order]:
    return [order for order in orders_of(KERNELS[which].ptx()) if order.entry == entry]
