"""Batches of few tokens: rows are written directly to where they are read, and an op is one launch of one block."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conformance.cases_scaled_rows import scaled_round
from conformance.cases_token_window import check_round, written
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.rounds import full_round, rounds_in_a_row
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer
from moe_rt.config.codec import RowFormat
from moe_rt.engine.cuda import CudaEngine
from moe_rt.errors import CapacityOverflow, GroupPoisoned, InvalidInput, InvalidRouting, MoeRtError, PeerTimeout

HANG_S = 600.0
FP8, INT8 = torch.float8_e4m3fn, torch.int8
WHOLE = {"dispatch_whole", "combine_whole", "combine_backward_send", "combine_backward_receive", "leave"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": dict(dtype=torch.bfloat16, hidden=136),
    "fp64": dict(dtype=torch.float64, hidden=5),
    "coded": dict(dtype=torch.bfloat16, hidden=400, dispatch_dtype=FP8, combine_dtype=INT8),
    "rows of tokens": dict(layout="tokens"),
    "rows that return one by one": dict(sums="invariant"),
    "aligned to 16": dict(expert_alignment=16),
    "dropped": dict(capacity_factor=0.4, overflow="drop"),
    "every expert": dict(num_topk=9),
}


def tokens_of(size: int, most: int) -> list[int]:
    """Return token counts that include the maximum and zero."""
    return [(most + 2 * rank) % (most + 1) if rank else most for rank in range(size)]


@pytest.mark.parametrize("name", CASES)
class TestEqualToTheOracle:
    @pytest.mark.parametrize("most", [1, 2])
    def test_in_one_launch(self, name: str, most: int) -> None:
        for size in (1, 2, 5) if name == "plain" else (3,):
            gpu = EmulatedGpu(threads=32)
            spec = make_spec(size, num_max_tokens_per_rank=most, **CASES[name])
            ThreadRanks(size, gpu).run(rounds_in_a_row, spec, tokens_of(size, most), [1, 2, 3], "random")
            assert set(gpu.launched) == WHOLE

    def test_rows_are_pushed(self, name: str) -> None:
        """Rounds equal the oracle below, at and above the bound for pushed rows."""
        for most in (3, 64, 65) if name == "plain" else (3,):
            gpu = EmulatedGpu(threads=32)
            spec = make_spec(3, num_max_tokens_per_rank=most, **CASES[name])
            ThreadRanks(3, gpu).run(full_round, spec, tokens_of(3, most), 4, "random")
            assert not set(gpu.launched) & {"dispatch_whole", "combine_whole"}


@pytest.mark.parametrize("row", [RowFormat(FP8, 1600, torch.float32, 16), RowFormat(torch.uint8, 33, torch.uint8, 7)])
@pytest.mark.parametrize("most", [2, 9])
def test_rows_with_scales(most: int, row: RowFormat) -> None:
    spec = make_spec(3, hidden=row.num_codes, dtype=torch.bfloat16, num_max_tokens_per_rank=most)
    ThreadRanks(3, EmulatedGpu(threads=32)).run(scaled_round, spec, row, tokens_of(3, most), [1, 2, 3])


def test_bounds_of_calls() -> None:
    """Dispatches that push rows, push only lists, or push neither share the same windows."""

    def case(group: Any) -> None:
        spec = make_spec(2, num_max_tokens_per_rank=140)
        with Buffer(group, timeout_s=HANG_S, **buffer_kwargs(spec)) as buffer:
            for seed, bound in enumerate((3, 140, 64, 65, 128, 2, 129, 1)):
                inputs = make_inputs(spec, [bound, bound // 2], seed)
                mine = [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
                recv_x, recv_weights, handle = buffer.dispatch(*mine, max_tokens=bound)
                out = buffer.combine(recv_x, recv_weights, handle)
                weights = torch.where(mine[1] >= 0, mine[2], 0).sum(1, keepdim=True)
                torch.testing.assert_close(out, weights * mine[0])

    ThreadRanks(2, EmulatedGpu(threads=32)).run(case)


@pytest.mark.parametrize("most", [2, 12])
def test_rows_that_their_producer_wrote(most: int) -> None:
    """Rows are pushed from the token window, which no peer reads."""

    def case(group: Any) -> None:
        spec = make_spec(2, hidden=20, num_max_tokens_per_rank=most)
        with Buffer(group, timeout_s=HANG_S, **buffer_kwargs(spec)) as buffer, torch.no_grad():
            for seed in range(4):
                inputs = make_inputs(spec, [most, most - 1], seed)
                check_round(buffer, inputs, written(buffer, inputs.xs[buffer.rank]))

    ThreadRanks(2, EmulatedGpu(threads=32)).run(case)


def bad_id(buffer: Buffer, mine: list[Any]) -> None:
    if buffer.rank == 1:
        mine[1][1, 1] = 2**32 + 1  # its lower half is a valid expert
    buffer.dispatch(*mine)


def no_room(buffer: Buffer, mine: list[Any]) -> None:
    mine[1][:] = torch.tensor([0, 1, 2])  # rank 0's experts
    buffer.dispatch(*mine)


def rows_missing(buffer: Buffer, mine: list[Any]) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    buffer.combine(recv_x[: 1 if buffer.rank == 1 else None], recv_weights, handle)


def silent_peer(buffer: Buffer, mine: list[Any]) -> None:
    if buffer.rank == 0:
        _, _, handle = buffer.dispatch(*mine)
        assert handle.offs.tolist() == [0] * len(handle.offs)


def attempt(act: Any, buffer: Buffer, mine: list[Any]) -> type | None:
    try:
        act(buffer, mine)
    except MoeRtError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("act", "changes", "raised"),
    [
        (bad_id, {}, InvalidRouting),
        (no_room, dict(capacity_factor=1.0), CapacityOverflow),
        (rows_missing, {}, InvalidInput),
        (silent_peer, {}, PeerTimeout),
    ],
)
def test_refusals_of_whole_ops(act: Any, changes: dict[str, Any], raised: type[MoeRtError]) -> None:
    spec = make_spec(2, num_max_tokens_per_rank=2, **changes)
    inputs = make_inputs(spec, [2, 2], seed=1, kind="topk")
    gpu, told = EmulatedGpu(threads=32), threading.Barrier(2)

    def case(group: Any) -> type | None:
        with Buffer(group, timeout_s=1.0 if act is silent_peer else HANG_S, **buffer_kwargs(spec)) as buffer:
            found = attempt(
                act, buffer, [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
            )
            told.wait(HANG_S)  # both ranks' launches are complete
            found = found or attempt(lambda buffer, _: buffer.check(), buffer, [])
            told.wait(HANG_S)
        return found

    found = ThreadRanks(2, gpu).outcomes(case)
    if act is silent_peer:
        assert found[0] is raised
    else:  # one rank raises it; the other may see its poison word before the entry it would refuse
        assert raised in found
        assert set(found) <= {raised, GroupPoisoned}
    assert gpu.launched.count("dispatch_whole") >= 1


@pytest.mark.parametrize("tokens", [2, 40], ids=["few tokens", "many tokens"])
def test_a_dispatch_after_the_failure_leaves_nothing_to_read(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A dispatch that fails, or was queued before the host learned of the failure, receives no rows, whatever its
    memory held."""
    spec = make_spec(2, num_max_tokens_per_rank=tokens)
    inputs = make_inputs(spec, [tokens] * 2, seed=1, kind="topk")
    monkeypatch.setattr(CudaEngine, "health", lambda engine: None)
    silence = threading.Barrier(2)

    def case(group: Any) -> list[int]:
        offs = []
        with Buffer(group, timeout_s=1.0, **buffer_kwargs(spec)) as buffer:
            mine = [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
            for _ in range(2 if buffer.rank == 0 else 0):
                offs.append(buffer.dispatch(*mine)[2].offs.tolist())
            silence.wait(HANG_S)
        return offs

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with the largest numbers
    try:
        found = ThreadRanks(2, EmulatedGpu(threads=32)).run(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == [[0] * spec.placement.num_local(0)] * 2
