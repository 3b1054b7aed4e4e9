"""Rows with scales on every heap: codes and scales arrive bit for bit, in every layout, or every rank raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import cases_scaled_rows as cases
from conftest import CPU_HEAPS, HEAPS
from support.ranks import Ranks
from support.routing import make_spec
from test_conformance import tokens_for

from moe_rt.config.codec import CODES, MOST_SCALES, SCALES, RowFormat, spelled
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.ops.reference import through_codec

MakeRanks = Callable[[str, int], Ranks]
FP8, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
UNEVEN = [0, 0, 0, 0, 0, 0, 1, 1, 2]
# Rows of 64 or 20 elements, whose parts are divisible by vectors of 16, 4 and 1 bytes.
FORMATS = {
    "fp8, fp32": RowFormat(FP8, 64, F32, 4),
    "e5m2, one fp32": RowFormat(torch.float8_e5m2, 64, F32, 1),
    "int8, fp32": RowFormat(torch.int8, 20, F32, 3),
    "fp8, exponents": RowFormat(FP8, 64, U8, 3),
    "fp8, packed exponents": RowFormat(FP8, 64, torch.int32, 2),
    "bytes": RowFormat(U8, 20, U8, 1),
    "two codes in a byte": RowFormat(U8, 32, U8, 4),
    "two codes in a byte, odd": RowFormat(U8, 10, U8, 5),
}


def hidden_of(row: RowFormat) -> int:
    return 64 if row.num_codes > 20 else 20


@pytest.mark.parametrize("heap", HEAPS)
class TestHeap:
    @pytest.mark.parametrize("name", FORMATS)
    def test_formats(self, make_ranks: MakeRanks, heap: str, name: str) -> None:
        row = FORMATS[name]
        spec = make_spec(3, hidden=hidden_of(row), dtype=torch.bfloat16)
        make_ranks(heap, 3).run(cases.scaled_round, spec, row, tokens_for(3), [1, 2, 3])

    @pytest.mark.parametrize("size", [1, 2, 4, 7])
    @pytest.mark.parametrize("layout", ["experts", "tokens"])
    def test_sizes(self, make_ranks: MakeRanks, heap: str, size: int, layout: str) -> None:
        spec = make_spec(size, layout=layout, dtype=torch.bfloat16)
        make_ranks(heap, size).run(cases.scaled_round, spec, cases.PLAIN, tokens_for(size), [1, 2])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
    def test_dtypes_of_what_comes_home(self, make_ranks: MakeRanks, heap: str, dtype: torch.dtype) -> None:
        spec = make_spec(2, dtype=dtype)
        make_ranks(heap, 2).run(cases.scaled_round, spec, cases.PLAIN, [12, 7], [1])

    @pytest.mark.parametrize("alignment", [8, 32])
    def test_padding_is_zero(self, make_ranks: MakeRanks, heap: str, alignment: int) -> None:
        for row in (cases.PLAIN, FORMATS["two codes in a byte, odd"]):
            spec = make_spec(3, expert_alignment=alignment, dtype=torch.bfloat16, placement=UNEVEN)
            make_ranks(heap, 3).run(cases.round_in_dirty_memory, spec, row, tokens_for(3))

    @pytest.mark.parametrize("changes", [{}, {"layout": "tokens"}, {"expert_alignment": 8}], ids=str)
    def test_drop_beyond_capacity(self, make_ranks: MakeRanks, heap: str, changes: dict[str, Any]) -> None:
        spec = make_spec(3, capacity_factor=0.3, overflow="drop", dtype=torch.bfloat16, **changes)
        make_ranks(heap, 3).run(cases.scaled_round, spec, cases.PLAIN, [12] * 3, [6, 7], "topk")

    def test_no_tokens_anywhere(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.scaled_round, make_spec(3), cases.PLAIN, [0] * 3, [3])

    def test_bound_of_the_call(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.scaled_round, make_spec(3), cases.PLAIN, [5, 0, 3], [1], "random", 1, 5)

    def test_beside_plain_rows(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.turns)

    def test_teams_change_no_bit(self, make_ranks: MakeRanks, heap: str) -> None:
        args = (make_spec(3, dtype=torch.bfloat16), cases.PLAIN, tokens_for(3), [8], "random")
        ranks = make_ranks(heap, 3)
        assert ranks.run(cases.scaled_round, *args, 3) == ranks.run(cases.scaled_round, *args, 1)

    @pytest.mark.parametrize("codec", [FP8, torch.int8])
    @pytest.mark.parametrize("changes", [{}, {"layout": "tokens"}, {"expert_alignment": 8}], ids=str)
    def test_codes_of_the_buffer(
        self, make_ranks: MakeRanks, heap: str, codec: torch.dtype, changes: dict[str, Any]
    ) -> None:
        spec = make_spec(2, hidden=300, dtype=torch.bfloat16, dispatch_dtype=codec, **changes)
        make_ranks(heap, 2).run(cases.scaled_round, spec, None, [12, 7], [1, 2])

    def test_each_rank_decodes_for_itself(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.each_for_itself)

    def test_any_memory(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 2).run(cases.as_they_lie, make_spec(2, dtype=torch.bfloat16), cases.PLAIN)

    @pytest.mark.parametrize(
        ("row", "got"),
        [
            (RowFormat(torch.int8, 20, F32, 2), "codes of torch.int8 with 2 scales of torch.float32"),
            (RowFormat(FP8, 20, F32, 3), "codes of torch.float8_e4m3fn with 3 scales of torch.float32"),
            (RowFormat(FP8, 20, torch.int32, 2), "codes of torch.float8_e4m3fn with 2 scales of torch.int32"),
            (RowFormat(U8, 10, F32, 2), "codes of torch.uint8, two in a byte, with 2 scales of torch.float32"),
            (None, "rows without scales"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("num_tokens", [4, 0])
    def test_ranks_that_disagree_are_refused(
        self, make_ranks: MakeRanks, heap: str, row: RowFormat | None, got: str, num_tokens: int
    ) -> None:
        """Every rank, also one without tokens, names a rank that it differs from."""
        texts = make_ranks(heap, 3).run(cases.disagreeing, 1, row, num_tokens)
        usual = "codes of torch.float8_e4m3fn with 2 scales of torch.float32"
        assert all(text.startswith("ConfigMismatch: dispatch #1 on rank ") for text in texts), texts
        told = [text for text in texts if "failed first" not in text]
        assert told, texts
        for text in told:
            theirs, ours = (usual, got) if "as on rank 1" in text else (got, usual)
            assert f"x: got {theirs} on rank " in text, text
            assert f", expected {ours} as on rank " in text, text

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("codes of two bytes", "x[0], codes: got torch.bfloat16 [4, 20] on cpu, expected torch.float8_e4m3fn"),
            ("codes of another width", "x[0], codes: got torch.float8_e4m3fn [4, 19] on cpu, expected torch.float8"),
            ("half as many fp8", "x[0], codes: got torch.float8_e4m3fn [4, 10] on cpu, expected torch.float8_e4m3fn"),
            ("codes of one dimension", "x[0], codes: got torch.float8_e4m3fn [20] on cpu, expected"),
            ("scales of fp64", "x[1], scales: got torch.float64 [4, 2] on cpu, expected torch.float32 [4, 2]"),
            ("scales of other tokens", "x[1], scales: got torch.float32 [3, 2] on cpu, expected torch.float32 [4, 2]"),
            ("scales of one dimension", "x[1], scales: got torch.float32 [4] on cpu, expected torch.float32 [4, 4]"),
            ("no scales", "x[1], scales: got torch.float32 [4, 0] on cpu, expected torch.float32 [4, 1]"),
            ("nothing for scales", "x: got a tuple of 2, expected rows, or (codes, scales)"),
            ("a number for scales", "x[1], scales: got a float, expected a torch.Tensor"),
            ("three of them", "x: got a tuple of 3, expected rows, or (codes, scales)"),
            ("a list", "x: got a list, expected a torch.Tensor"),
            ("too many bytes", "x: got rows of 68 bytes with their scales, expected at most 64"),
            ("scales that train", "x: got codes, or coded=True, in a dispatch that gradients are recorded of"),
            ("rows that train, coded", "x: got codes, or coded=True, in a dispatch that gradients are recorded of"),
            ("no codec", "coded: got True without scales, expected a buffer with a dispatch_dtype"),
        ],
    )
    def test_wrong_input_of_one_rank(self, make_ranks: MakeRanks, heap: str, fault: str, message: str) -> None:
        texts = make_ranks(heap, 3).run(cases.refused, 1, fault)
        assert texts[1].replace("on cuda:0", "on cpu").startswith(f"InvalidInput: {message}"), texts[1]
        ended = ("InvalidInput: ", "GroupPoisoned: ") if heap == "loopback" else ("InvalidInput: ",)
        assert all(text.startswith(ended) for text in texts), texts


@pytest.mark.parametrize("heap", HEAPS)
def test_other_layers_are_told_without_a_handle(make_ranks: MakeRanks, heap: str) -> None:
    """A dispatch has no handle, so its error shows none, although the call word has a value in that place."""
    texts = make_ranks(heap, 2).run(cases.other_tags)
    assert any(text.startswith("CallOrderMismatch: ") for text in texts), texts
    assert all("handle" not in text for text in texts), texts
    assert heap == "shm" or any("dispatch of layer tag 1; " in text or "tag 2; " in text for text in texts), texts


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_retry_makes_room(make_ranks: MakeRanks, heap: str) -> None:
    few = make_spec(3, capacity_factor=0.1)
    capacities = make_ranks(heap, 3).run(cases.retried)
    assert any(capacity > few.capacity(rank) for rank, capacity in enumerate(capacities))


def test_a_row_in_the_window(make_ranks: MakeRanks) -> None:
    """A row in the window consists of codes, then scales at a multiple of 16 bytes, and nothing more."""
    window, codes, scales = make_ranks("threads", 1).run(cases.window_bytes)[0]
    assert torch.equal(window[:, :4096], codes.view(torch.uint8))
    assert torch.equal(window[:, 4096 : 4096 + 132], scales.view(torch.uint8))
    assert (window[:, 4096 + 132 :] == 0xA5).all()


@pytest.mark.parametrize("codec", [FP8, torch.int8])
def test_codes_mean_what_decoding_gives(codec: torch.dtype) -> None:
    """Codes decode to the buffer's rows, for values of every magnitude and non-finite ones."""
    rows = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-42, 37, 40)[:, None]
    rows[1, 5], rows[2, 150], rows[3] = float("nan"), float("inf"), 0.0
    codes, scales, want_codes, want_scales = cases.of_own_codec(codec, rows)
    assert codes.dtype is codec
    check_bits("codes", codes, want_codes)
    check_bits("scales", scales.nan_to_num(-1.0), want_scales.nan_to_num(-1.0))
    decoded = codes.float() * scales.repeat_interleave(128, 1)[:, :200]
    torch.testing.assert_close(decoded, through_codec(rows, codec), rtol=0, atol=0, equal_nan=True)


def test_words_tell_formats_apart() -> None:
    rows = [RowFormat(c, n, s, k) for c in CODES for n in (16, 32) for s in SCALES for k in (1, 2, MOST_SCALES)]
    words = [row.word(32) for row in rows]
    assert len(set(words)) == len(rows)
    assert all(0 < word < 1 << 32 for word in words)
    assert len({spelled(word) for word in words}) == len(rows)
    assert spelled(0) == "rows without scales"
    assert spelled(0xBFFFFFFF) == "rows of an unknown kind (0xbfffffff)"
