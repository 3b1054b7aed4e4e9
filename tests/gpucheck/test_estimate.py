"""Estimates follow the formula, and the document's tables are those of today's kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpucheck.estimates_tool import ROOT, estimates_tool

from moe_rt.config.codec import Codec
from moe_rt.config.tuning import Tuning
from moe_rt.lab.check import estimate
from moe_rt.lab.check.code_limits import LIMITS, Limits
from moe_rt.lab.check.estimate import MACHINES, STEPS, TARGETS_US, Load, op_us, rows_of
from moe_rt.lab.check.measuring import fewest_bytes
from moe_rt.lab.check.ring_estimate import estimate_ring, most_blocks

H200 = next(machine for machine in MACHINES if machine.name == "H200")


def test_tables_are_those_of_the_estimates() -> None:
    module = estimates_tool()
    assert module.generated(ROOT) == (ROOT / module.DOCUMENT).read_text(), "run python tools/estimates.py --write"


def test_a_changed_kernel_changes_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    module = estimates_tool()
    before = module.launches_table()
    assert before.count("\n") == 1 + len(STEPS) + 3
    slower = LIMITS["sm_90a"][Codec.RAW] | {
        "combine_receive": Limits((16, 1), narrow=0, system_fences=None, barriers=4)
    }
    monkeypatch.setitem(LIMITS["sm_90a"], Codec.RAW, slower)
    after = module.launches_table()
    changed = [a.split("`")[1] for a, b in zip(before.split("\n"), after.split("\n"), strict=True) if a != b]
    assert changed == ["combine_receive"]


def test_rows_are_counted_as_gpucheck_counts_them() -> None:
    """A launch without lists moves the bytes that gpucheck counts as the fewest."""
    load = Load(4096)
    counted = fewest_bytes(load.tokens, round(load.pulled), load.copies, load.row)
    for kernel, num_bytes in counted.items():
        assert rows_of(kernel, load).fewest_bytes == pytest.approx(num_bytes, rel=1e-4)
    assert load.ranks_of_a_token == pytest.approx(5.29, abs=0.01)
    assert Load(1, ranks=1).ranks_of_a_token == 1
    assert Load(1, coded=True).wire == 7168 + 4 * 56
    pushed, pulled = rows_of("dispatch_send", Load(64)), rows_of("dispatch_send", Load(65))
    assert pushed.link_bytes == pytest.approx(7 / 8 * (Load(64).pulled * 14336 + 16 * Load(64).pulled + 20 * 64 * 8))
    assert pulled.link_bytes == 0
    assert rows_of("dispatch_receive", Load(64)).link_bytes == 0


def test_what_limits_a_launch() -> None:
    """Few tokens are limited by a launch's steps; many by the links."""
    few = estimate.estimate("dispatch_receive", Load(3), H200)
    steps = estimate.LAUNCH_S + 5 * 0.65e-6
    assert few.seconds == pytest.approx(steps + 0.65e-6), "896 vectors, 512 lanes, 4 at once: one round, at home"
    few = estimate.estimate("dispatch_receive", Load(65, coded=True), H200)
    assert few.rows_s > 2 * 1.75e-6, "of peers, 345 rows on 132 blocks"
    more = estimate.estimate("dispatch_receive", Load(129), H200)
    assert more.steps_s == pytest.approx(2 * 0.65e-6 + 3 * 1.75e-6), "lists are read where they were made"
    many = estimate.estimate("dispatch_receive", Load(4096), H200)
    assert many.rows_s == pytest.approx(many.link_bytes / 355e9)
    assert many.steps_s == pytest.approx(more.steps_s + estimate.LAUNCH_S + 0.65e-6), "a launch waits before"
    assert many.bytes_per_sm == 512 * 16 * 4


def test_narrow_loads_take_their_latency_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bytewise = LIMITS["sm_90a"][Codec.FP8] | {"dispatch_receive": Limits((1, 1), None, None, 12)}
    monkeypatch.setitem(LIMITS["sm_90a"], Codec.FP8, bytewise)
    coded = estimate.estimate("dispatch_receive", Load(4096, coded=True), H200)
    assert coded.rows_s == pytest.approx(11 * 231 * 1.75e-6), "11 rows of a warp, 231 loads of a byte each, one by one"
    assert coded.bytes_per_sm == 512


def test_each_gpu_has_what_its_machine_code_has_under_way() -> None:
    load = Load(4096, coded=True)
    kib = {m.name: estimate.estimate("dispatch_receive", load, m).bytes_per_sm // 1024 for m in MACHINES}
    assert kib == {"H100": 64, "H200": 64, "B200": 32}


def test_one_row_more_than_blocks_takes_little_longer() -> None:
    assert [estimate.warps_together(rows, 132) for rows in (1, 132, 133, 1056, 1057, 5000)] == [16, 16, 8, 2, 1, 1]


def test_few_blocks_have_less_under_way() -> None:
    few, all_of_them = (estimate.estimate("combine_receive", Load(4096), H200, n).rows_s for n in (8, None))
    assert few > 4 * all_of_them


def test_rings_have_more_under_way_on_few_blocks() -> None:
    """Rings have more bytes in flight, up to the rates of a multiprocessor and of the links; kernels that sum rows do
    not change."""
    load, blocks = Load(4096), 8
    lanes = estimate.estimate("dispatch_receive", load, H200, blocks)
    assert lanes.rows_s == pytest.approx(170 * 7 * 1.75e-6), "of a warp's rows, and of a lane's loads in a row"
    ring = estimate_ring("dispatch_receive", load, H200, blocks)
    assert ring.rows_s == pytest.approx(ring.memory_bytes / (blocks * 64 * 1.7e9))
    assert (lanes.bytes_per_sm, ring.bytes_per_sm) == (32 << 10, 16 * 6 * 1536)
    slow = replace(H200, clock=1e12, link=1e15, memory=1e15)
    alone = estimate_ring("dispatch_receive", load, slow, blocks)
    assert alone.rows_s == pytest.approx(-(-170 * 10 // 6) * 1.75e-6), "ten pieces of a row, six under way"
    for kernel in ("combine_send", "combine_backward_receive"):
        assert estimate_ring(kernel, load, H200, 8) == estimate.estimate(kernel, load, H200, 8)
    assert estimate_ring("dispatch_receive", Load(4096, coded=True), H200, 8).bytes_per_sm == 64 << 10


def test_rings_are_for_as_many_blocks_as_leave_links_idle() -> None:
    assert [most_blocks(machine) for machine in MACHINES] == [18, 18, 39]
    assert max(map(most_blocks, MACHINES)) == Tuning.ring_blocks


def test_rows_are_pushed_up_to_where_pulling_them_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed rows save a wait for a peer, but every visit writes a row: U of them for each token, not one."""

    def longer(machine: estimate.Machine, tokens: int, coded: bool) -> float:
        times = []
        for rows in (tokens, 0):
            monkeypatch.setattr(Tuning, "pushed_rows", rows)
            times.append(op_us("dispatch", Load(tokens, coded=coded), machine))
        return times[0] / times[1]

    most = Tuning.pushed_rows
    for machine in MACHINES:
        for coded in (False, True):
            assert longer(machine, most // 2, coded) < 1
            assert longer(machine, most, coded) < 1.01
        assert longer(machine, 4 * most, coded=False) > 1.01


def test_routing_counts_all_tokens_and_writes_its_own() -> None:
    long = estimate.routing_s(Load(4096), H200, 132, 3)
    counted, written = (4096 - 128) / 32 * (12 * 8 + 2 * 8 * 7 + 2 * 8), 256 * 8 / 32 * 300
    assert long == pytest.approx((counted + written) / (2 * 1.7e9) + 3 * 0.65e-6)
    assert estimate.routing_s(Load(1), H200, 132, 3) == pytest.approx(8 / 32 * 300 / (2 * 1.7e9) + 3 * 0.65e-6)
    assert estimate.routing_s(Load(4096), H200, 8, 3) > 5 * long, "one block routes"


def test_an_op_of_one_launch() -> None:
    """The estimate adds a launch, its steps, its rows twice by one multiprocessor, and routing without waits for
    memory."""
    one = estimate.estimate("dispatch_whole", Load(1, coded=True), H200)
    load = Load(1, coded=True)
    received = rows_of("dispatch_receive", load).memory_bytes / (64 * 1.7e9)
    assert one.steps_s == pytest.approx(6 * 0.65e-6 + 2 * 1.75e-6)
    assert one.rows_s == pytest.approx(0.65e-6 + received + 8 / 32 * 300 / (2 * 1.7e9)), "114 KB are written by one"
    assert one.seconds == pytest.approx(2e-6 + one.steps_s + one.rows_s)
    for op in ("dispatch", "combine"):
        assert estimate.launches_of(op, Load(2)) == (f"{op}_whole",)
        assert estimate.launches_of(op, Load(3)) == estimate.OPS[op]


def test_no_op_takes_longer_than_what_is_published() -> None:
    """Each op's estimate is at most the published time, with fp8 rows in dispatch, as published."""
    for (op, tokens), target in TARGETS_US.items():
        assert op_us(op, Load(tokens, coded=op == "dispatch"), H200) <= target


def test_an_op_is_whole_where_that_is_faster() -> None:
    def both(op: str, tokens: int) -> tuple[float, float]:
        load = Load(tokens, coded=True)
        two = sum(estimate.estimate(kernel, load, H200).seconds for kernel in estimate.OPS[op])
        return estimate.estimate(f"{op}_whole", load, H200).seconds, two

    for op in ("dispatch", "combine"):
        whole, two = both(op, 2)
        assert whole <= two
    whole, two = both("combine", 3)
    assert whole > two
