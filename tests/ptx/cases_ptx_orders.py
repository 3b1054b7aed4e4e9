"""Cases that reach the barriers, releases and acquires of kernels: rounds of two ranks, and ops that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from conformance.cases_scaled_rows import PLAIN, make_scaled, open_buffer, play_scaled
from device.test_network import closes_after_its_last_op, dispatches_in_a_row
from device.test_ring import ring_rounds
from ptx import cases_ptx_nodes
from ptx.cases_ptx_failures import ACTS, outcomes_on
from ptx.cases_ptx_nodes import NODES
from ptx.gpu import PtxGpu, set_default_tuning
from ptx.modules import ptx_of
from ptx.network import NetworkGpu
from ptx.orders import Order, orders_of
from ptx.own_process import run_on
from ptx.ring_kernels import RingGpu
from ptx.test_ptx_failures import judge
from support.ranks import ThreadRanks
from support.rounds import CPU, full_round, one_round, rounds_in_a_row
from support.routing import make_inputs, make_spec

from moe_rt.config.spec import BufferSpec
from moe_rt.config.tuning import Tuning
from moe_rt.engine.gpu.launcher import RING_SOURCE, kernel_defines
from moe_rt.errors import MoeRtError
from moe_rt.lab.testing.rounds import check_bits

NODES_APART = ("a round", "a silent neighbour", "a silent rank that is served")
# One failing wait for each op.
ACTS_APART = ("silent peer", "other op", "silent peer in backward")
# The other acts rewrite a peer's memory, or synchronise in an order that a network does not provide.
ACTS_OVER_NETWORK = tuple(act for act in ACTS if act != "corrupt lists")


def _round(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(full_round, make_spec(2), [12, 7], 1, "random")


def _fails(act: str) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        judge(act, outcomes_on(gpu, act))

    return run


def _ringed(spec: BufferSpec, num_tokens: list[int]) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        run_on(gpu, 2, ring_rounds, spec, num_tokens, 2)

    return run


def _in_a_row(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(rounds_in_a_row, make_spec(2), [12, 7], [5, 6], "random")


def _aligned(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(full_round, make_spec(2, expert_alignment=16), [12, 7], 1, "random")


def waits_apart(case: Callable[[PtxGpu], None]) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        before = set_default_tuning(wait_apart_tokens=8)
        try:
            case(gpu)
        finally:
            set_default_tuning(**before)

    return run


def _two_tiles(gpu: PtxGpu) -> None:
    """One block routes both tiles."""
    ThreadRanks(1, gpu).run(full_round, make_spec(1, num_max_tokens_per_rank=530), [530], 3, "topk")


def _over_network(case: Callable[..., Any], *args: Any) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        ThreadRanks(2, gpu).run(case, *args)

    return run


def _three_ranks(gpu: PtxGpu) -> None:
    spec = make_spec(3, placement=[e % 3 for e in range(9)])
    ThreadRanks(3, gpu).run(full_round, spec, [12, 7, 12], 1, "random")


def _on_one_block(gpu: PtxGpu) -> None:
    """Each warp has several rows in turn, and the fetching block has two sources."""
    ThreadRanks(3, gpu).run(rounds_on_one_block)


def rounds_on_one_block(group: Any) -> None:
    spec = make_spec(3, placement=[e % 3 for e in range(9)])
    with open_buffer(group, spec, num_sms=1) as buffer:
        one_round(buffer, make_inputs(spec, [12, 7, 12], 1, "random"), 1)
        inputs = make_inputs(spec, [12, 7, 12], 1)
        play_scaled(buffer, inputs, make_scaled(PLAIN, inputs.num_tokens, 1), CPU, 1)


def _refused_on_one_block(gpu: PtxGpu) -> None:
    assert ThreadRanks(3, gpu).run(refused_on_one_block) == ["InvalidRouting"] * 3


def refused_on_one_block(group: Any) -> str:
    """The first of two sources has announced no lists."""
    spec = make_spec(3)
    inputs = make_inputs(spec, [12, 7, 12], 1)
    with open_buffer(group, spec, num_sms=1) as buffer:
        mine = [each[buffer.rank].clone() for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
        if buffer.rank == 0:
            mine[1][0, 0] = 99
        try:
            buffer.dispatch(*mine)
            buffer.check()
        except MoeRtError as error:
            return type(error).__name__
    return ""


def backwards_in_a_row(group: Any) -> None:
    """Backward of several combines, whose gradients nothing else orders, equals that of one pair after the other."""
    spec = make_spec(2)
    inputs = make_inputs(spec, [12, 7], 1)
    with open_buffer(group, spec) as buffer:
        x, idx, weights = (each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))

        def grads(pairs: int, at_once: bool) -> list[torch.Tensor]:
            xs = [x.clone().requires_grad_() for _ in range(pairs)]
            if not at_once:
                for one in xs:
                    recv_x, recv_weights, handle = buffer.dispatch(one, idx, weights)
                    buffer.combine(recv_x, recv_weights, handle).square().sum().backward()
            else:
                sent = [buffer.dispatch(one, idx, weights) for one in xs]
                outs = [buffer.combine(*each) for each in sent]
                torch.stack(outs).square().sum().backward()
            return [one.grad for one in xs if one.grad is not None]

        expected = grads(1, at_once=False)
        for grad in grads(5, at_once=True):
            check_bits("grad_x", grad, expected[0])


def _closing_slowly(gpu: Any) -> None:
    with gpu.slow():
        for _ in range(16):  # a rank that sees its peer's close does not rendezvous again
            ThreadRanks(2, gpu).run(closes_after_its_last_op, 1)


@dataclass(frozen=True)
class Kernels:
    """Kernels compiled from one source for two ranks of `spec`.

    `cases` starts with the cheap ones: a mutant runs the cases that reach it until one notices.
    """

    source: str
    make: Callable[[], PtxGpu]
    cases: dict[str, Callable[[PtxGpu], None]]
    hidden: int = 20

    def ptx(self) -> str:
        defines = kernel_defines(make_spec(2, hidden=self.hidden), self.threads)
        return ptx_of(self.source, defines, nvshmem=self.is_network)

    @property
    def is_network(self) -> bool:
        return self.source in ("kernels_rdma.cu", "kernels_nodes.cu")

    @property
    def threads(self) -> int:
        return Tuning.network_threads if self.is_network else Tuning.threads


NETWORK_SPEC = make_spec(2, placement=[e % 2 for e in range(9)])
NETWORK_ALIGNED = make_spec(2, placement=[e % 2 for e in range(9)], expert_alignment=16)
RING_SPEC = make_spec(2, hidden=272, num_max_tokens_per_rank=70)
KERNELS = {
    "ring": Kernels(
        RING_SOURCE,
        RingGpu,
        {
            "a round": _ringed(make_spec(2, hidden=272), [12, 7]),
            "rows that are pulled": _ringed(RING_SPEC, [70, 66]),
        },
        hidden=RING_SPEC.hidden,
    ),
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
            "a round that waits apart": waits_apart(_over_network(full_round, NETWORK_SPEC, [12, 7], 1, "random")),
            **{f"{act}, who waits apart": waits_apart(_fails(act)) for act in ACTS_APART},
            "dispatches in a row": _over_network(dispatches_in_a_row, 1),
            "backwards in a row": _over_network(backwards_in_a_row),
            "closing after an op": _over_network(closes_after_its_last_op, 1),
            "closing over a slow network": _closing_slowly,
            "a round of aligned experts": _over_network(full_round, NETWORK_ALIGNED, [12, 7], 1, "random"),
            "rounds on one block": _on_one_block,
            "a refusal on one block": _refused_on_one_block,
            **{act: _fails(act) for act in ACTS_OVER_NETWORK},
            "rounds in a row": _over_network(rounds_in_a_row, NETWORK_SPEC, [12, 7], [5, 6], "random"),
        },
    ),
    "nodes": Kernels(
        "kernels_nodes.cu",
        partial(NetworkGpu, nodes=NODES),
        {
            **cases_ptx_nodes.CASES,
            **{f"{name}, apart": waits_apart(cases_ptx_nodes.CASES[name]) for name in NODES_APART},
        },
    ),
}


def reached(which: str) -> dict[str, set[tuple[str, int]]]:
    """Return the (entry, line) pairs that each case reaches."""
    gpu, found = KERNELS[which].make(), {}
    for name, case in KERNELS[which].cases.items():
        case(gpu)
        found[name] = gpu.reached()
    return found


def noticed(which: str, order: Order, names: Sequence[str]) -> str:
    """Return the report of the first case that fails without `order`, or "" if every case passes."""
    gpu = KERNELS[which].make()
    gpu.mute(order.entry, order.line)
    for name in names:
        try:
            KERNELS[which].cases[name](gpu)
        except Exception as error:  # wrong bits and wrong errors also count
            return f"{name}: {gpu.fault() or repr(error)}"
        if fault := gpu.fault():  # when memory is freed
            return f"{name}: {fault}"
    return ""


def fault_of(which: str, name: str) -> str:
    """Return the report of a case with all orders in place, or "" if it passes."""
    gpu = KERNELS[which].make()
    KERNELS[which].cases[name](gpu)
    return gpu.fault()


def orders(which: str, entry: str) -> list[Order]:
    return [order for order in orders_of(KERNELS[which].ptx()) if order.entry == entry]
