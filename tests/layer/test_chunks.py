"""A layer in chunks: rows and their gradients have the bits of one chunk, and ops overlap with the experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer import cases_chunks as cases
from layer.cases_layer import config
from support.ranks import Ranks

from moe_rt.errors import InvalidConfig
from moe_rt.nn import chunks

MakeRanks = Callable[[str, int], Ranks]
BITWISE = {"rtol": 0, "atol": 0}
KINDS = ["plain", "shared", "biases", "split", "transposed", "frozen experts", "frozen on one rank", "frozen router"]
KINDS += ["no input gradient", "no tokens", "one token", "one per chunk", "autocast", "checkpoint", "reentrant", "lora"]
KINDS += ["other experts", "hooks", "checkpoint of experts", "no_grad"]
DEPENDENT = {"autocast", "lora", "split"}  # whose rows depend on each other's number


@pytest.mark.parametrize("num_chunks", [2, 3, 5])
def test_bounds_of_chunks(num_chunks: int) -> None:
    """Every batch fits into the bounds of its chunks, and these exceed the whole's by rounding only."""
    for most in range(1, 60):
        bounds = [chunks._size(most, i, num_chunks) for i in range(num_chunks)]
        for num_tokens in range(most + 1):
            ends = chunks._ends(num_tokens, num_chunks)
            sizes = [end - start for start, end in itertools.pairwise(ends)]
            assert (len(sizes), sum(sizes)) == (num_chunks, num_tokens)
            assert all(0 <= size <= bound for size, bound in zip(sizes, bounds, strict=True))
        assert sum(bounds) < most + num_chunks


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_one_chunk(make_ranks: MakeRanks, kind: str) -> None:
    for one, many in make_ranks("shm", 2).run(cases.one_and_many, kind, 4):
        sums: dict[str, float] = {"rtol": 0.05, "atol": 0.2} if kind == "autocast" else {}
        rows = sums if kind in DEPENDENT else BITWISE
        torch.testing.assert_close(many[0], one[0], **rows)
        torch.testing.assert_close(many[1].pop("x"), one[1].pop("x"), **rows)
        torch.testing.assert_close(many[1], one[1], **sums)  # sums over rows are in parts
        assert many[4] == one[4]
        begun = [text for text in many[2] if text.startswith("begin")]
        ops = "dispatch", "dispatch", "dispatch", "combine", "dispatch", "combine", "combine", "combine"
        assert begun == [f"begin {op}" for op in ops]


@pytest.mark.parametrize("use", cases.USES)
def test_uses(make_ranks: MakeRanks, use: str) -> None:
    """Chunks change no row, whatever else the layer does."""
    for (y, grads, _), (same, same_grads, begun) in make_ranks("shm", 2).run(cases.used, use):
        torch.testing.assert_close((same, same_grads), (y, grads))
        num_chunks = chunks._CHUNKS_THAT_GAIN if "automatic" in use else 4
        num_ops = {"tangents": 0, "two graphs": 2, "layer after layer": 2}.get(use, 1) * num_chunks
        assert begun.count("begin dispatch") == begun.count("begin combine") == num_ops


def overlapped(num_chunks: int) -> list[str]:
    """Return the order of a forward."""
    seen = ["begin dispatch", "end dispatch"]
    for i in range(num_chunks):
        ops = ["dispatch"] * (i + 1 < num_chunks) + ["combine"] * (i > 0)
        during = [f"{half} {op}" for op in ops for half in ("begin", "end")]
        seen += [*during[:1], "half-way", *during[1:-1], "experts", *during[-1:]]
    return [*seen, "begin combine", "end combine"]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5])
def test_order(make_ranks: MakeRanks, num_chunks: int) -> None:
    """Experts of another chunk run between the halves of an op. The order of backward is the reverse one."""
    for _, _, forward, backward, _ in make_ranks("shm", 2).run(cases.gradients, "plain", num_chunks):
        if num_chunks == 1:
            assert forward == ["half-way", "experts"]
            continue
        assert forward == overlapped(num_chunks)
        swapped = {"begin": "end", "end": "begin"}
        expected = [" ".join((swapped[half], op + "_backward")) for half, op in
                    (text.split() for text in reversed(forward) if " " in text)]  # fmt: skip
        assert backward == expected


def test_weights_come_while_the_last_exchange_is_under_way(make_ranks: MakeRanks) -> None:
    """Each gradient comes once, as the sum over chunks, between the halves of the first chunk's dispatch_backward."""
    for seen in make_ranks("shm", 2).run(cases.weight_gradients, 3, False):
        assert seen[-4::3] == ["begin dispatch_backward", "end dispatch_backward"], seen
        assert set(seen[-3:-1]) == {"gate_up_proj", "down_proj"}
        assert not {"gate_up_proj", "down_proj"} & set(seen[:-4])


def test_weights_do_not_wait_for_an_exchange_if_a_hook_may_read_them(make_ranks: MakeRanks) -> None:
    for seen in make_ranks("shm", 2).run(cases.weight_gradients, 3, True):
        assert seen[-2:] == ["begin dispatch_backward", "end dispatch_backward"], seen


def test_backward_of_parts_and_again(make_ranks: MakeRanks) -> None:
    """A backward that needs no weights, or no rows, leaves nothing to the next one."""
    for one, many in make_ranks("shm", 2).run(cases.backward_again):
        torch.testing.assert_close(many, one)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "fsdp of experts"])
def test_data_parallel(make_ranks: MakeRanks, wrap: str) -> None:
    for (y, grads), (same, expected) in make_ranks("shm", 2).run(cases.wrapped, wrap):
        torch.testing.assert_close(same, y, **BITWISE)
        torch.testing.assert_close(expected, grads)


def test_a_rank_with_whole_ops(make_ranks: MakeRanks) -> None:
    """It runs them in the order of the ranks that overlap."""
    for y, grad, same, same_grad in make_ranks("shm", 2).run(cases.ranks_differ, "profiler"):
        torch.testing.assert_close((same, same_grad), (y, grad))


def test_means_of_gradients_are_taken_once(make_ranks: MakeRanks) -> None:
    """They may be collectives over copies of the experts: ranks that overlap and others must take equally many."""
    assert make_ranks("shm", 2).run(cases.num_means) == [2, 2]


@pytest.mark.parametrize("own", [False, True])
def test_ranks_with_whole_ops_take_means_in_the_order_of_the_others(make_ranks: MakeRanks, own: bool) -> None:
    """Means are collective over copies of the experts: they and exchanges must not wait for each other in a circle."""
    cases.check_means(make_ranks("shm", 4).run(cases.whole_next_to_copies, "profiler", own))


def test_numbers_that_differ(make_ranks: MakeRanks) -> None:
    assert {text.split(":")[0] for text in make_ranks("shm", 2).run(cases.different_numbers)} == {"ConfigMismatch"}


def test_a_turn_ends_with_its_experts() -> None:
    """Experts of another layer give no turn to the ops of experts that raised."""
    seen: list[str] = []

    def fail(_: Any) -> Any:
        raise ValueError("a mistake on purpose")

    turns = [(lambda: seen.append("begin"), lambda: seen.append("end"))] * 2
    with pytest.raises(ValueError, match="on purpose"):
        chunks._compute_during(turns, SimpleNamespace(), fail, True)  # type: ignore[arg-type]
    chunks.half_way()
    assert seen == ["begin"]


def test_too_many_tokens(make_ranks: MakeRanks) -> None:
    """Every rank names the batch's tokens, not a chunk's, and may go on."""
    for rank, (text, after) in enumerate(make_ranks("shm", 2).run(cases.too_many_tokens)):
        most = cases.config().num_max_tokens_per_rank
        expected = f"num_max_tokens_per_rank = {most}" if rank == 1 else f"{most}, num_max_tokens_per_rank"
        assert f"got {most + 1} tokens, expected at most {expected}" in text, (rank, text)
        assert after == "2 tokens"


def test_exception_while_an_op_is_under_way(make_ranks: MakeRanks) -> None:
    """The next op of that rank is refused on every rank, by an error that names the op under way."""
    first, second = make_ranks("shm", 2).run(cases.raises_between)
    assert first[0].startswith("ValueError"), first
    assert "while dispatch of layer tag" in first[1]
    assert any(text.startswith("InvalidInput") for text in second), second


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "many"])
def test_wrong_numbers(wrong: Any) -> None:
    with pytest.raises(InvalidConfig, match="num_chunks: got"):
        config(num_chunks=wrong)


def test_auto_depends_on_what_all_ranks_share() -> None:
    """It is 1 unless rows travel between the halves, and are many for the experts' width."""
    sizes = {"num_ranks": 2, "num_topk": 2, "num_experts": 8, "hidden": 2048, "dtype": torch.float32}
    spec = SimpleNamespace(num_max_tokens_per_rank=512, **sizes)
    buffer: Any = SimpleNamespace(num_ranks=2, heap="ucx", spec=spec)
    assert chunks.number(7, buffer, 256) == 7
    assert chunks.number("auto", buffer, 256) > 1
    assert chunks.number("auto", buffer, 257) == 1
    spec.num_max_tokens_per_rank = 511
    assert chunks.number("auto", buffer, 8) == 1
    spec.num_max_tokens_per_rank, buffer.heap = 512, "shm"
    assert chunks.number("auto", buffer, 256) == 1
