"""Memory of tensors that engines make or check: token windows, recycled pages, and whether two tensors overlap."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from support.routing import make_spec
from torch import Tensor

from moe_rt.engine import checks, storage, token_window
from moe_rt.engine.storage import Recycler
from moe_rt.engine.token_window import TokenWindows, require_window
from moe_rt.errors import InvalidConfig, InvalidInput

MIB = 1 << 20
CPU = torch.device("cpu")


class Kept:
    """Keeps a segment mapped."""


class Segment:
    """A rank's segment in memory of the test, and its windows."""

    def __init__(self, **changes: Any) -> None:
        self.spec = make_spec(2, **changes)
        self.shape, self.keep = self.spec.shape(), Kept()
        self.memory = torch.zeros(self.shape.segment_bytes() + 64, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.num_bytes = self.spec.num_max_tokens_per_rank * self.shape.row_bytes()
        self.windows = TokenWindows(self.spec, self.shape, self.address, CPU, self.keep)

    def at(self, offset: int, num_bytes: int = 1) -> Tensor:
        return self.memory[offset : offset + num_bytes]


@pytest.mark.parametrize("num_tokens", [0, 1, 12])
@pytest.mark.parametrize("window", [0, 3])
def test_windows_for_as_many_tokens_as_a_rank_may_send(num_tokens: int, window: int) -> None:
    assert require_window(make_spec(2), 1, num_tokens, window) == window


@pytest.mark.parametrize("num_tokens", [-1, 13, True, 1.0, None])
def test_another_number_of_tokens_is_refused(num_tokens: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        require_window(make_spec(2), 1, num_tokens, 0)
    expected = "expected an integer in [0, num_max_tokens_per_rank = 12]"
    assert raised.value.args[0] == f"num_tokens: got {num_tokens!r}, {expected}"
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"dispatch_dtype": torch.int8}, "a buffer with dispatch_dtype=torch.int8, expected None: rows are coded"),
        ({}, "a stream that is being captured, or a buffer whose ops were, in a CUDA graph, expected neither"),
    ],
)
def test_buffers_without_windows(changes: dict[str, Any], got: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        require_window(make_spec(2, **changes), 1, 5, None)
    assert raised.value.args[0].startswith(f"token_window: got {got}")
    assert raised.value.rank == 1


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_window_has_the_rows_of_its_place_in_the_segment(depth: int, dtype: torch.dtype) -> None:
    segment = Segment(depth=depth, dtype=dtype)
    pitch = segment.shape.row_bytes()
    for window in range(2 * depth):
        for num_tokens in (12, 5, 0):
            rows = segment.windows.hand_out(window, num_tokens)
            assert (rows.shape, rows.dtype, rows.device) == ((num_tokens, 20), dtype, CPU)
            assert rows.stride() == (pitch // dtype.itemsize, 1)
            assert rows._base is None, "it is no view"
            if num_tokens:
                assert rows.data_ptr() == segment.address + segment.shape.tokens_at(window)
    with pytest.raises(IndexError):
        segment.windows.hand_out(2 * depth, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_tensors_in_a_window_are_told_to_the_byte(depth: int) -> None:
    segment = Segment(depth=depth)
    for window in range(2 * depth):
        start = segment.shape.tokens_at(window)
        last = start + segment.num_bytes
        others = {segment.shape.tokens_at(w) for w in range(2 * depth)}
        assert segment.windows.touch(segment.at(start))
        assert segment.windows.touch(segment.at(last - 1))
        assert last in others or not segment.windows.touch(segment.at(last))
        assert not segment.windows.touch(segment.at(start - 1))
        assert not segment.windows.touch(segment.at(start, 0)), "an empty tensor is nowhere"
    assert not segment.windows.touch(torch.zeros(3).to_sparse())
    inside = segment.windows.hand_out(0, 5)
    assert (segment.windows.hold(inside), segment.windows.hold(inside._neg_view())) == (True, False)
    assert not segment.windows.hold(torch.zeros(5, 20))


def test_only_the_rows_that_were_handed_out_are_published() -> None:
    segment = Segment()
    windows = segment.windows
    expected = "expected all rows of the tensor that token_window gave since the last op, or memory of their own"

    def problem(x: Tensor, window: int = 1, scaled: bool = False) -> str:
        found = windows.problem(x, window, scaled)
        assert not found or found.endswith(f", {expected}")
        return found.removesuffix(f", {expected}").removeprefix("x: got ")

    rows = windows.hand_out(1, 5)
    assert problem(rows) == ""
    assert problem(rows[:3]) == "", "the first rows"
    assert problem(rows[:1, :]) == problem(rows[:, :1]) == ""
    assert problem(rows[1:]) == problem(rows[::2]) == problem(rows[:, ::2]) == "part of a token window"
    assert problem(rows.t()) == "part of a token window"
    assert problem(rows.as_strided((1, 20), (7, 1))) == "", "a single row has no distance to the next"
    assert problem(rows, 0) == "a token window of an earlier op"
    assert problem(rows, scaled=True) == "codes in a token window"
    assert problem(windows.hand_out(0, 5), 0) == ""
    assert problem(rows) == "a token window of an earlier op", "another one was handed out since"
    windows.retire()
    assert problem(rows, 0) == "a token window of an earlier op"


def test_rows_that_are_elsewhere_although_a_window_was_handed_out() -> None:
    segment = Segment()
    own, empty = torch.zeros(5, 20), torch.zeros(0, 20)
    assert not segment.windows.is_elsewhere(own)
    rows = segment.windows.hand_out(0, 5)
    elsewhere = [segment.windows.is_elsewhere(x) for x in (own, rows, empty, rows._neg_view())]
    assert elsewhere == [True, False, False, True]
    segment.windows.retire()
    assert not segment.windows.is_elsewhere(own)


@pytest.mark.parametrize("inference", [False, True])
def test_autograd_learns_that_later_ops_overwrite_a_window(inference: bool) -> None:
    segment = Segment()
    with torch.inference_mode(inference):
        windows = TokenWindows(segment.spec, segment.shape, segment.address, CPU, segment.keep)
    rows = [windows.hand_out(window, 5) for window in range(2)]
    assert not any(t.is_inference() for t in rows)
    before = [t._version for t in rows]
    windows.retire()
    assert [t._version for t in rows] == [version + 1 for version in before]


def test_a_tensor_of_a_window_keeps_the_segment_mapped() -> None:
    segment = Segment()
    kept = weakref.ref(segment.keep)
    rows = segment.windows.hand_out(0, 5)
    memory = segment.memory
    del segment
    gc.collect()
    assert kept() is not None
    del rows
    gc.collect()
    assert kept() is None
    assert memory.numel()


def test_memory_of_a_gpu_is_taken_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(token_window.torch, "as_tensor", lambda memory, device: seen.append((memory, device)))
    keep, device = Kept(), torch.device("cuda", 1)
    token_window._bytes_at(4096, 77, device, keep)
    ((memory, where),) = seen
    assert (memory.keep, where) == (keep, device)
    assert memory.__cuda_array_interface__ == {"shape": (77,), "typestr": "|u1", "data": (4096, False), "version": 3}


def test_memory_of_the_host_is_taken_byte_by_byte() -> None:
    memory = ctypes.create_string_buffer(b"abc", 3)
    taken = token_window._bytes_at(ctypes.addressof(memory), 3, CPU, None)
    assert (taken.dtype, bytes(taken.tolist())) == (torch.uint8, b"abc")


@pytest.mark.parametrize("like", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "num_bytes"),
    [
        (0, 0),
        (9, 720),
        (10, 2 * MIB),  # the smallest block of the test
        (11, 2 * MIB),
        (2 * MIB // 80, 2 * MIB),
        (2 * MIB // 80 + 1, 4 * MIB),
        (4 * MIB // 80 + 1, 6 * MIB),
    ],
)
def test_large_outputs_have_whole_huge_pages(
    monkeypatch: pytest.MonkeyPatch, like: bool, num_rows: int, num_bytes: int
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(storage, "ask_for_huge_pages_at", lambda address, size: asked.append((address, size)))
    memory = Recycler(800)
    made = memory.empty_like(torch.zeros(1), num_rows, 20) if like else memory.empty(num_rows, 20, torch.float32)
    assert (made.shape, made.stride(), made.dtype) == ((num_rows, 20), (20, 1), torch.float32)
    assert made.storage_offset() == 0
    assert made.untyped_storage().nbytes() == num_bytes
    assert asked == ([(made.data_ptr(), num_bytes)] if num_bytes > 800 else [])


@pytest.mark.parametrize("itemsize", [2, 8])
def test_sizes_are_in_bytes(itemsize: int) -> None:
    dtype = {2: torch.bfloat16, 8: torch.float64}[itemsize]
    memory = Recycler(20 * 10 * itemsize)
    for num_rows, is_block in ((9, False), (10, True)):
        for made in (memory.empty(num_rows, 20, dtype), memory.empty_like(torch.zeros(1, dtype=dtype), num_rows, 20)):
            assert (made.untyped_storage().nbytes() == 2 * MIB) is is_block


def test_free_pages_are_handed_out_before_new_ones_are_taken() -> None:
    memory = Recycler(800)
    first, second = memory.empty(10, 20, torch.float32), memory.empty(10, 20, torch.float32)
    places = first.data_ptr(), second.data_ptr()
    assert len(set(places)) == 2
    del second
    third = memory.empty(20, 20, torch.bfloat16)
    assert third.data_ptr() == places[1]
    del first
    assert memory.empty(12, 4, torch.float64).data_ptr() not in (places[1],)


def overlapping(one: range, other: range) -> bool:
    return bool(set(one) & set(other))


def test_tensors_overlap_if_they_share_a_byte() -> None:
    memory = torch.zeros(12, dtype=torch.uint8)
    ranges = [range(begin, end) for begin, end in itertools.combinations(range(8), 2)]
    for one, other in itertools.product(ranges, repeat=2):
        found = checks.overlap(memory[one.start : one.stop], memory[other.start : other.stop])
        assert found is overlapping(one, other), (one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_torch_owes_are_stored(dtype: torch.dtype) -> None:
    zeros = torch._efficientzerotensor((2, 3), dtype=dtype)
    found = checks.as_stored(zeros)
    assert not found._is_zerotensor()
    assert (found.shape, found.dtype, found.device) == (zeros.shape, dtype, CPU)
    assert not found.any()
    t = torch.arange(6, dtype=dtype).view(2, 3)
    assert checks.as_stored(t) is t
    negated, turned = checks.as_stored(t._neg_view()), checks.as_stored(t.t())
    assert not negated.is_neg()
    assert turned.is_contiguous()
    assert torch.equal(negated, -t)


def test_sizes_of_tensors_without_any() -> None:
    for t, first, last in ((torch.zeros(4, 5), 4, 5), (torch.zeros(7), 7, 7), (torch.tensor(1.0), 0, 0)):
        assert (checks.length(t), checks.last(t)) == (first, last)
