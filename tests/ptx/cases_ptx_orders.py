"""What reaches the barriers, releases and acquires of kernels: rounds of two ranks, and ops that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness import ThreadRanks
from ptx.cases_ptx_failures import ACTS, outcomes_on
from ptx.gpu import PtxGpu
from ptx.modules import ptx_of
from ptx.orders import Order, orders_of
from ptx.test_ptx_failures import judge
from rounds import full_round, rounds_in_a_row
from routing import make_spec

from moe_rt.native.launcher import kernel_defines


def _round(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(full_round, make_spec(2), [12, 7], 1, "random")


def _fails(act: str) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        judge(act, outcomes_on(gpu, act))

    return run


def _in_a_row(gpu: PtxGpu) -> None:
    ThreadRanks(2, gpu).run(rounds_in_a_row, make_spec(2), [12, 7], [5, 6], "random")


# Cheap ones first: a mutant runs those that reach it until one notices.
CASES: dict[str, Callable[[PtxGpu], None]] = {
    "a round": _round,
    **{act: _fails(act) for act in ACTS},
    "rounds in a row": _in_a_row,
}


def module() -> str:
    """The PTX that all of this is about."""
    return ptx_of("kernels.cu", kernel_defines(make_spec(2)))


def reached() -> dict[str, set[tuple[str, int]]]:
    """By case: entries, and lines of them."""
    gpu, found = PtxGpu(), {}
    for name, case in CASES.items():
        case(gpu)
        found[name] = gpu.reached()
    return found


def noticed(order: Order, cases: Sequence[str]) -> str:
    """What is said without it, by the first case that notices; nothing if none does."""
    gpu = PtxGpu()
    gpu.mute(order.entry, order.line)
    for name in cases:
        try:
            CASES[name](gpu)
        except Exception as error:  # wrong bits and wrong errors are noticed, too
            return f"{name}: {gpu.fault() or repr(error)}"
    return ""


def orders(entry: str) -> list[Order]:
    return [order for order in orders_of(module()) if order.entry == entry]
