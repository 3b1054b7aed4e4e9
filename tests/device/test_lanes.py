"""Block shapes of a GPU: any number of lanes, warps of 32, constant sizes with wide vectors, and small capacity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.cases_scaled_rows import as_they_lie, scaled_round
from support.emulated_gpu import EmulatedGpu, EmulatedKernels
from support.ranks import ThreadRanks
from support.rounds import full_round, one_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.config.codec import RowFormat
from moe_rt.engine.cuda import blocks_of_a_wait
from moe_rt.engine.gpu.driver import Launches

# 32 and more: warps of 32 lanes, and routing tiles whose masks have a word or more; 33 lanes are not whole warps.
LANES = (1, 3, 32, 33, 96, 256)
# The widest vector that divides a row: single elements, 2, 4, 8 and 16 bytes. The last are coded, in blocks of which
# the last is short, by elements and by sixteen.
SIZES: dict[str, dict[str, Any]] = {
    "2 bytes": dict(dtype=torch.bfloat16, hidden=5),
    "4 bytes": dict(dtype=torch.float16, hidden=6),
    "8 bytes": dict(dtype=torch.float32, hidden=70),
    "16 bytes": dict(dtype=torch.float32, hidden=20),
    "coded": dict(
        dtype=torch.bfloat16, hidden=136, dispatch_dtype=torch.float8_e4m3fn, combine_dtype=torch.float8_e4m3fn
    ),
    "codes in 16 bytes": dict(
        dtype=torch.bfloat16, hidden=400, dispatch_dtype=torch.int8, combine_dtype=torch.float8_e4m3fn
    ),
}
BETWEEN = ("4 bytes", "8 bytes")

# Parts of multiples of 16 bytes, more than lanes have in flight together, and of 4 and 1.
FP8 = torch.float8_e4m3fn
SCALED = (
    RowFormat(FP8, 1600, torch.float32, 16),
    RowFormat(torch.int8, 36, torch.int32, 3),
    RowFormat(torch.uint8, 33, torch.uint8, 7),
)


MORE_LANES = (*LANES[:-1], pytest.param(LANES[-1], marks=pytest.mark.sweep))  # for tests of the row format


@pytest.mark.emulated("sets the number of lanes")
class TestLanes:
    @pytest.mark.parametrize("lanes", LANES)
    @pytest.mark.parametrize("kind", ["random", pytest.param("one_expert", marks=pytest.mark.sweep)])
    def test_several_tiles(self, lanes: int, kind: str) -> None:
        spec = make_spec(2, num_max_tokens_per_rank=2 * lanes + 5)
        ThreadRanks(2, EmulatedGpu(num_sms=6, threads=lanes)).run(full_round, spec, [2 * lanes + 5, lanes], 1, kind)

    @pytest.mark.parametrize("lanes", MORE_LANES)
    @pytest.mark.parametrize("hidden", [150, 272])
    def test_coded_rows(self, lanes: int, hidden: int) -> None:
        """Rows are coded by elements, and by sixteen if warps have lanes for it."""
        spec = make_spec(3, hidden=hidden, dispatch_dtype=torch.int8, combine_dtype=torch.int8)
        ThreadRanks(3, EmulatedGpu(num_sms=6, threads=lanes)).run(full_round, spec, [12, 0, 7], 2, "topk")

    @pytest.mark.parametrize("lanes", MORE_LANES)
    def test_rows_with_scales(self, lanes: int) -> None:
        ranks = ThreadRanks(3, EmulatedGpu(num_sms=6, threads=lanes))
        for row in SCALED:
            ranks.run(scaled_round, make_spec(3, hidden=row.num_codes, dtype=torch.bfloat16), row, [12, 0, 7], [2])


@pytest.mark.parametrize("row", [RowFormat(FP8, 48, torch.float32, 4), RowFormat(torch.uint8, 24, torch.uint8, 7)])
def test_vectors_of_rows_with_scales(row: RowFormat) -> None:
    """Each part moves in the widest vectors that divide it, and padding is cleared in them; a misaligned one ends the
    process."""
    spec = make_spec(2, hidden=48, dtype=torch.bfloat16, expert_alignment=8)
    ranks = ThreadRanks(2, EmulatedGpu(num_sms=6, threads=32, constants=True))
    ranks.run(scaled_round, spec, row, [12, 7], [3])
    ranks.run(as_they_lie, spec, row)


@pytest.mark.parametrize(
    "sizes", [pytest.param(name, marks=pytest.mark.sweep if name in BETWEEN else ()) for name in SIZES]
)
def test_constant_sizes(sizes: str) -> None:
    spec = make_spec(2, **SIZES[sizes])
    gpu = EmulatedGpu(num_sms=6, threads=32, constants=True)
    ThreadRanks(2, gpu).run(full_round, spec, [12, 7], 3, "random")
    ThreadRanks(1, gpu).run(odd_places, SIZES[sizes])


def odd_places(group: ThreadGroup, sizes: dict[str, Any]) -> None:
    """Run a round on tensors that start in the middle of a vector; loading a whole vector there would end the
    process."""
    spec = make_spec(1, **sizes)
    inputs = make_inputs(spec, [12], 4)
    inputs.xs[0] = torch.cat([torch.zeros(1, dtype=spec.dtype), inputs.xs[0].flatten()])[1:].view(12, spec.hidden)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        assert inputs.xs[0].data_ptr() % 16
        recv_x, recv_weights, handle = buffer.dispatch(inputs.xs[0], inputs.topk_idx[0], inputs.topk_weights[0])
        shifted = torch.empty(recv_x.numel() + 1, dtype=spec.dtype)[1:].view_as(recv_x)
        out = buffer.combine(shifted.copy_(recv_x), recv_weights, handle)
        assert torch.equal(out, buffer.combine(recv_x, recv_weights, handle))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_little_room(num_ranks: int) -> None:
    """Rounds complete when waiting blocks fill the GPU except for one sending launch; one block more would deadlock."""
    gpu = EmulatedGpu(num_sms=num_ranks + 1)
    spec = make_spec(num_ranks, num_max_tokens_per_rank=40)
    assert blocks_of_a_wait(num_ranks, gpu, None, shared=True) == 1  # type: ignore[arg-type]
    ThreadRanks(num_ranks, gpu).run(several_rounds, spec, [40 - 3 * r for r in range(num_ranks)])


def several_rounds(group: ThreadGroup, spec: Any, num_tokens: list[int]) -> None:
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        for seed in range(5):
            one_round(buffer, make_inputs(spec, num_tokens, seed), seed)


@pytest.mark.parametrize("kind", ["random", "one_expert"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_blocks_route(num_ranks: int, kind: str) -> None:
    """Five blocks of one rank, or two of each of two ranks, route several tiles of two tokens."""
    spec = make_spec(num_ranks, num_max_tokens_per_rank=40)
    ThreadRanks(num_ranks, EmulatedGpu(num_sms=48, threads=4)).run(full_round, spec, [40, 33][:num_ranks], 5, kind)


@pytest.mark.emulated("watches the emulated launches")
def test_blocks_that_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing adds blocks to one block per row, up to the size of launches that only move rows."""
    blocks: dict[str, list[int]] = {}
    launch = EmulatedKernels.launch

    def recorded(self: EmulatedKernels, launches: Launches, **options: Any) -> None:
        for name, number in launches:
            blocks.setdefault(name, []).append(number)
        launch(self, launches, **options)

    monkeypatch.setattr(EmulatedKernels, "launch", recorded)
    for num_tokens in (0, 1, 30, 200):
        spec = make_spec(1, num_max_tokens_per_rank=200)
        ThreadRanks(1, EmulatedGpu(num_sms=40, threads=1)).run(full_round, spec, [num_tokens], 6, "random")
    assert sorted(set(blocks["dispatch_send"])) == [2, 35, 40]
    assert max(blocks["dispatch_receive"]) == 40


@pytest.mark.emulated("names a number of multiprocessors")
def test_room_of_a_wait() -> None:
    """One rank fills the GPU; virtual ranks leave an eighth, and at least one block, to launches that send."""

    def blocks(num_ranks: int, num_sms: int) -> int:
        return blocks_of_a_wait(num_ranks, EmulatedGpu(num_sms), None, shared=True)  # type: ignore[arg-type]

    assert [blocks(n, 132) for n in (1, 2, 4, 116)] == [132, 58, 29, 1]
    assert [blocks(n, 8) for n in (1, 2, 7)] == [8, 3, 1]


def test_memory_outlives_the_last_launch() -> None:
    """Memory of the last kernel is kept until the stream is done, without a wait of the host."""
    gpu = EmulatedGpu()
    buffer = Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(make_spec(1)))
    launcher = buffer._engine._launcher  # type: ignore[attr-defined]
    expected = {memory.data_ptr() for memory in (*launcher.memory, launcher.record)}
    expected |= {memory.data_ptr() for memory in buffer._engine._segments.mappings}  # type: ignore[attr-defined]
    buffer.close()
    assert gpu.launched[-1] == "leave"
    assert expected <= set(gpu.outlived)
