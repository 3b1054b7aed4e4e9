"""Rows that their producer wrote into the window arrive like any others; windows of another op are refused on all
ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conformance import cases_token_window as cases
from conftest import CPU_HEAPS, HEAPS
from support.ranks import Ranks
from support.routing import make_spec
from torch.utils.flop_counter import FlopCounterMode

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import GroupClosed, InvalidConfig, InvalidInput

MakeRanks = Callable[[str, int], Ranks]
# Rows that fill their place in the window, and rows of 80, 10 and 272 bytes with padding after them.
ROWS: dict[str, dict[str, Any]] = {
    "64 bytes": dict(dtype=torch.float32, hidden=16),
    "80 bytes": dict(dtype=torch.float32, hidden=20),
    "10 bytes": dict(dtype=torch.bfloat16, hidden=5),
    "tokens": dict(dtype=torch.float16, hidden=136, layout="tokens"),
    "coded home": dict(dtype=torch.bfloat16, hidden=136, combine_dtype=torch.int8),
}


@pytest.mark.parametrize("heap", HEAPS)
class TestWindows:
    @pytest.mark.parametrize("rows", ["64 bytes", "80 bytes", "10 bytes", "coded home"])
    @pytest.mark.parametrize("size", [1, 3])
    def test_matches_reference(self, make_ranks: MakeRanks, heap: str, size: int, rows: str) -> None:
        make_ranks(heap, size).run(cases.rounds_from_windows, make_spec(size, **ROWS[rows]), [12, 0, 7][:size])

    def test_beside_rows_that_are_copied(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.rounds_from_windows, make_spec(3, hidden=20), [12, 5, 7], 1)

    def test_free_running(self, make_ranks: MakeRanks, heap: str) -> None:
        make_ranks(heap, 3).run(cases.free_run, 20 if heap == "loopback" else 200)

    @pytest.mark.parametrize("name", cases.NOT_FOR_NOW)
    def test_refused_everywhere(self, make_ranks: MakeRanks, heap: str, name: str) -> None:
        texts = make_ranks(heap, 3).run(cases.refused_window, name)
        got = "a token window of an earlier op" if name.startswith("after") else "part of a token window"
        assert texts[1].startswith(f"InvalidInput: x: got {got}, expected all rows of the tensor"), texts[1]
        for text in texts[::2]:
            assert text.startswith("InvalidInput:" if heap != "loopback" else ("InvalidInput:", "GroupPoisoned:")), text


@pytest.mark.parametrize("heap", CPU_HEAPS)
class TestWindowsOnTheCpu:
    @pytest.mark.parametrize("hidden", [16, 20])
    def test_a_retry_takes_the_rows_along(self, make_ranks: MakeRanks, heap: str, hidden: int) -> None:
        make_ranks(heap, 3).run(cases.retried, hidden)

    def test_memory_outlives_the_buffer(self, make_ranks: MakeRanks, heap: str) -> None:
        assert make_ranks(heap, 2).run(cases.kept_past_the_end) == [2.0 * 12 * make_spec(2).hidden] * 2


def open_alone(**more: Any) -> Buffer:
    return cases.open_buffer(ThreadGroup.make(1)[0], make_spec(1, **more))


def test_what_a_window_is() -> None:
    """A window is new to autograd in any mode, has the requested length, and is the same memory until an op takes
    it."""
    with open_alone(hidden=20) as buffer:
        with torch.inference_mode():
            first = buffer.token_window(12)
        assert not first.is_inference()
        assert not first.requires_grad
        assert first.shape == (12, 20)
        again = buffer.token_window(3)
        assert again.data_ptr() == first.data_ptr()
        buffer.combine(*buffer.dispatch(again.fill_(1.0), cases.given(buffer)[1][:3], torch.ones(3, 3)))
        for wrong in (-1, 13, 2.0, True):
            with pytest.raises(InvalidInput, match=r"num_tokens: got .*, expected an integer in \[0, "):
                buffer.token_window(wrong)  # type: ignore[arg-type]
    with pytest.raises(GroupClosed):
        buffer.token_window(1)


def test_rows_that_travel_coded_have_no_window() -> None:
    says = r"got a buffer with dispatch_dtype=torch\.int8, expected None: rows are coded"
    with open_alone(hidden=136, dispatch_dtype=torch.int8) as buffer, pytest.raises(InvalidConfig, match=says):
        buffer.token_window(1)


def test_codes_in_a_window_are_refused() -> None:
    with open_alone(hidden=16) as buffer, torch.no_grad():
        codes = buffer.token_window(7).view(torch.int8)[:, :16]
        with pytest.raises(InvalidInput, match="codes in a token window"):
            buffer.dispatch((codes, torch.ones(7, 1)), *cases.given(buffer)[1:])


@pytest.mark.parametrize("how", [{}, {"wait": False}], ids=["a whole op", "halves"])
def test_gradients_are_not_recorded(how: dict[str, Any]) -> None:
    """Gradients of rows or weights are refused: ops would overwrite what autograd saved of the window."""
    with open_alone(hidden=16) as buffer:
        x, idx, weights = cases.given(buffer)
        for rows, factors in ((x.requires_grad_(), weights), (x.detach(), weights.clone().requires_grad_())):
            with pytest.raises(InvalidInput, match=r"expected torch\.no_grad\(\), or rows in memory of their own"):
                buffer.dispatch(cases.written(buffer, rows), idx, factors, **how)
        inputs = cases.make_inputs(buffer.spec, [7], 2)
        cases.check_round(buffer, inputs, cases.written(buffer, inputs.xs[0]))  # grad mode, but nothing recorded


def test_what_autograd_has_kept_is_not_read_again() -> None:
    """A graph over the window fails in its backward, instead of reading the rows of another op."""
    with open_alone(hidden=16) as buffer:
        x, idx, weights = cases.given(buffer)
        factor = torch.ones(16, requires_grad=True)
        window = cases.written(buffer, x)
        product = (window * factor).sum()
        with torch.no_grad():
            buffer.dispatch(window, idx, weights)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.filterwarnings("error")
def test_compiled() -> None:
    """The window is a graph break, then ordinary memory: the dispatch from it is compiled, and copies rows."""
    with open_alone(hidden=20) as buffer, torch.no_grad():
        _, idx, weights = cases.given(buffer)

        def step(x: torch.Tensor) -> torch.Tensor:
            window = buffer.token_window(7)
            window.copy_(x)
            recv_x, recv_weights, handle = buffer.dispatch(window, idx, weights)
            return buffer.combine(recv_x, recv_weights, handle)

        compiled = torch.compile(step, backend="aot_eager")
        for seed in range(3):
            x = torch.randn(7, 20, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize("given_window", [False, True])
def test_a_graph_does_not_write_over_the_next_rows(given_window: bool) -> None:
    """A graph may not take a window: it writes in place only at its end, over rows that a later dispatch has
    published."""
    with open_alone(hidden=16) as buffer, torch.no_grad():
        x, idx, weights = cases.given(buffer)

        def two_layers(x: torch.Tensor, window: torch.Tensor | None) -> torch.Tensor:
            window = buffer.token_window(7) if window is None else window
            window.copy_(x)
            out = buffer.combine(*buffer.dispatch(window, idx, weights))
            return buffer.dispatch(torch.full_like(out, 5.0), idx, weights)[0]

        compiled = torch.compile(two_layers, backend="aot_eager")
        window = buffer.token_window(7)
        buffer.combine(*buffer.dispatch(window.copy_(x), idx, weights))
        if given_window:
            window = buffer.token_window(7)
            with pytest.raises(InvalidInput, match=r"to be written and dispatched outside of torch"):
                compiled(x, window)
        else:
            compiled(x, None)
            assert torch.equal(window, torch.full_like(window, 5.0))


def test_a_row_has_any_stride() -> None:
    """A single row is accepted with any stride, which has no meaning for one row and differs between views."""
    with open_alone(hidden=20) as buffer, torch.no_grad():
        x, idx, weights = cases.given(buffer)
        window = buffer.token_window(1)[0].unsqueeze(0).copy_(x[:1])
        out = buffer.combine(*buffer.dispatch(window, idx[:1], weights[:1]))
        assert torch.equal(out, buffer.combine(*buffer.dispatch(x[:1], idx[:1], weights[:1])))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("rows", [torch.ones(7, 16).to_sparse(), torch.ones(())], ids=["sparse", "scalar"])
def test_odd_rows_are_refused_while_a_window_is_out(rows: torch.Tensor, watched: bool) -> None:
    """Unusual rows raise InvalidInput, and not an error of torch, which would leave the peers uninformed."""
    with open_alone(hidden=16) as buffer, FlopCounterMode(display=False) if watched else nullcontext():
        _, idx, weights = cases.given(buffer)
        buffer.token_window(7)
        with pytest.raises(InvalidInput, match="x: got "):
            buffer.dispatch(rows, idx, weights.clone().requires_grad_())
