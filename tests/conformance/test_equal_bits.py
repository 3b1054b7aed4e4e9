"""sums="invariant": the bits of one process, for any number of ranks, placement, heap, route and threads.

tests/layer/test_equal_layers.py has whole layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance.cases_equal_bits import KINDS, E, K, in_one_process, make_batch, one_rank, rows_of_experts, splits
from conftest import HEAPS
from support.combinations import each_value
from support.emulated_gpu import EmulatedGpu
from support.ranks import Ranks, ThreadRanks
from support.rounds import one_round, rounds_in_a_row
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import ConfigMismatch, InvalidConfig
from moe_rt.lab.testing.rounds import check_bits, check_close

MakeRanks = Callable[[str, int], Ranks]
FP8, INT8 = torch.float8_e4m3fn, torch.int8
TOKENS = 29
ROWS: dict[str, tuple[torch.dtype, Any, Any]] = {
    "fp32": (torch.float32, None, None),
    "bf16": (torch.bfloat16, None, None),
    "fp16": (torch.float16, None, None),
    "int8 rows": (torch.bfloat16, INT8, INT8),
    "fp8 rows": (torch.float32, FP8, FP8),
}


def joined(ranks: Ranks, batch: Any, **options: Any) -> list[torch.Tensor]:
    """Return the outputs and gradients of all tokens, computed by these ranks."""
    parts = ranks.run(one_rank, batch, options, splits(len(batch.x), ranks.size))
    return [torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True)]


def check_all(name: str, got: list[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for part, g, e in zip(("out", "grad_x", "grad_weights"), got, expected, strict=True):
        check_bits(f"{part} of {name}", g, e)


class TestAnyNumberOfRanks:
    @pytest.mark.parametrize(("rows", "kind"), itertools.product(ROWS, KINDS))
    def test_equal_bits(self, rows: str, kind: str) -> None:
        dtype, there, home = ROWS[rows]
        batch = make_batch(TOKENS, 136, dtype, kind)
        options = dict(dispatch_dtype=there, combine_dtype=home)
        alone = joined(ThreadRanks(1), batch, **options)
        out, grad_x, grad_weights = in_one_process(batch, there, home)
        check_all("one rank", alone, (out, grad_x, alone[2]))
        if there is None and home is None:
            check_close("grad_weights", alone[2], grad_weights, 136)
        for size in (2, 3, 4, 7, 8):
            threads = 3 if size == 3 else 1
            check_all(f"{size} ranks", joined(ThreadRanks(size), batch, num_threads=threads, **options), alone)

    @pytest.mark.parametrize(("rows", "kind"), each_value(ROWS, KINDS))
    def test_equal_bits_on_other_paths(self, rows: str, kind: str) -> None:
        """Nodes, scattered experts, padding, and an emulated GPU change no bit."""
        dtype, there, home = ROWS[rows]
        batch = make_batch(TOKENS, 48, dtype, kind, seed=1)
        options = dict(dispatch_dtype=there, combine_dtype=home)
        alone = joined(ThreadRanks(1), batch, **options)
        for nodes in ((0, 0, 1, 1), (0, 1, 1), (1, 0, 1, 0, 0)):
            got = joined(ThreadRanks(len(nodes), nodes=nodes), batch, route="two_level", **options)
            check_all(f"nodes {nodes}", got, alone)
        scattered = [(5 * e + 1) % 4 for e in range(E)]
        got = joined(ThreadRanks(4), batch, placement=scattered, expert_alignment=16, **options)
        check_all("scattered experts", got, alone)
        one, three = (joined(ThreadRanks(size, EmulatedGpu(threads=32)), batch, **options) for size in (1, 3))
        check_all("a GPU", three, [*alone[:2], one[2]])  # whose lanes add up dot products in another order


@pytest.mark.parametrize("heap", HEAPS)
def test_heaps(make_ranks: MakeRanks, heap: str) -> None:
    batch = make_batch(TOKENS, 20, torch.bfloat16, "random", seed=2)
    check_all(heap, joined(make_ranks(heap, 3), batch), joined(make_ranks(heap, 1), batch))


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(dtype=torch.bfloat16, hidden=136, num_topk=9),
        dict(dtype=torch.float64, hidden=5),
        dict(dtype=torch.float16, hidden=300, dispatch_dtype=FP8, combine_dtype=INT8),
        dict(dtype=torch.bfloat16, hidden=33, combine_dtype=FP8),
        dict(capacity_factor=0.4, overflow="drop"),
        dict(capacity_factor=0.4, overflow="drop", combine_dtype=INT8, expert_alignment=8),
    ],
    ids=lambda changes: ", ".join(map(str, changes.values())) or "plain",
)
def test_matches_reference(make_ranks: MakeRanks, heap: str, changes: dict[str, Any]) -> None:
    """All outputs of rounds equal the oracle's, with out=, dropped rows and three rounds on one buffer."""
    spec = make_spec(3, sums="invariant", **changes)
    make_ranks(heap, 3).run(rounds_in_a_row, spec, [12, 0, 7], [1, 2, 3], "random")


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2), (1, 0, 1, 0, 0)], ids=str)
@pytest.mark.parametrize("changes", [dict(), dict(num_topk=9, combine_dtype=FP8, dtype=torch.bfloat16)], ids=str)
def test_nodes_match_reference(nodes: tuple[int, ...], changes: dict[str, Any]) -> None:
    spec = make_spec(len(nodes), sums="invariant", route="two_level", **changes)
    tokens = [12, 0, 7, 3, 1][: len(nodes)]
    ThreadRanks(len(nodes), nodes=nodes).run(rounds_in_a_row, spec, tokens, [1, 2, 3], "random")


def round_of_late_entries(group: Any, spec: BufferSpec, first: int) -> None:
    """Run a round in which the first entries of each token are -1."""
    inputs = make_inputs(spec, [3, 0, 12, 5][: group.size], 1)
    for idx in inputs.topk_idx:
        idx[:, :first] = -1
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        one_round(buffer, inputs, 1)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("first", [0, 33])
def test_more_entries_than_bits_of_a_word(nodes: tuple[int, ...], first: int) -> None:
    """A proxy notes which of 40 entries visit its node, for one client or two."""
    spec = make_spec(len(nodes), sums="invariant", route="two_level", num_experts=48, num_topk=40)
    ThreadRanks(len(nodes), nodes=nodes).run(round_of_late_entries, spec, first)


def test_ranked_sums_do_differ() -> None:
    """The default sums give other bits on four ranks than on one, so the comparisons above can fail."""
    batch = make_batch(TOKENS, 136, torch.bfloat16, "zipf")
    assert not torch.equal(ranked(ThreadRanks(1), batch), ranked(ThreadRanks(4), batch))


def ranked(ranks: Ranks, batch: Any) -> torch.Tensor:
    return torch.cat(ranks.run(_ranked_rank, batch, splits(len(batch.x), ranks.size)))


def _ranked_rank(group: Any, batch: Any, counts: list[int]) -> torch.Tensor:
    start = sum(counts[: group.rank])
    mine = slice(start, start + counts[group.rank])
    sizes = dict(num_max_tokens_per_rank=TOKENS, num_experts=E, num_topk=K, hidden=136, dtype=torch.bfloat16)
    with Buffer(group, **sizes) as buffer:
        recv_x, weights, handle = buffer.dispatch(batch.x[mine], batch.idx[mine], batch.weights[mine])
        y = rows_of_experts(recv_x, handle, list(buffer.spec.placement.local_experts(group.rank)))
        return buffer.combine(y, weights, handle)


class TestRefusals:
    def test_rows_of_tokens(self) -> None:
        expected = 'sums: got invariant, expected "ranked" with layout="tokens"'
        with pytest.raises(InvalidConfig, match=expected):
            make_spec(2, sums="invariant", layout="tokens")

    def test_unknown_order(self) -> None:
        with pytest.raises(InvalidConfig, match="sums: got fast, expected one of"):
            make_spec(2, sums="fast")

    def test_ranks_that_differ(self) -> None:
        def make(group: ThreadGroup) -> None:
            sums = "invariant" if group.rank == 1 else "ranked"
            sizes = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=2, num_experts=4, dtype=torch.float32)
            Buffer(group, sums=sums, **sizes)

        for outcome in ThreadRanks(2).outcomes(make):
            assert isinstance(outcome, ConfigMismatch)
            assert "sums" in str(outcome)
