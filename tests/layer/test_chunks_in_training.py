"""Layers in chunks train in wrappers, with checkpointing and scaling, and after errors, as layers in one chunk do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layer import cases_chunks_in_training as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]
BITWISE = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("recompute", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_options_of_the_wrapper(make_ranks: MakeRanks, static: bool, view: bool, recompute: str) -> None:
    options = {"static_graph": static, "gradient_as_bucket_view": view}
    for many, one in make_ranks("shm", 2).run(cases.in_wrapper, recompute, 1, options):
        torch.testing.assert_close(many, one)


@pytest.mark.parametrize("view", [False, True])
def test_micro_batches_without_sync(make_ranks: MakeRanks, view: bool) -> None:
    for many, one in make_ranks("shm", 2).run(cases.in_wrapper, "", 3, {"gradient_as_bucket_view": view}):
        torch.testing.assert_close(many, one)


def test_an_overflow_of_one_rank_skips_the_step(make_ranks: MakeRanks) -> None:
    for one, many in make_ranks("shm", 2).run(cases.scaled):
        torch.testing.assert_close(many, one)
        assert many[0] == 512.0


def test_transforms_are_refused_and_leave_the_layer_usable(make_ranks: MakeRanks) -> None:
    for texts in make_ranks("shm", 2).run(cases.refused):
        assert texts[1::2] == [""] * 5
        for text, said in zip(
            texts[::2], [*["under torch.func"] * 3, "under torch.vmap", "second derivative"], strict=True
        ):
            assert text.startswith("InvalidInput"), texts
            assert said in text


def test_copies_and_pickles(make_ranks: MakeRanks) -> None:
    for first, *others in make_ranks("shm", 2).run(cases.copied):
        for other in others:
            torch.testing.assert_close(other, first, **BITWISE)


def test_numbers_change_between_steps_on_all_ranks(make_ranks: MakeRanks) -> None:
    texts = []
    for (first, *others), text in make_ranks("shm", 2).run(cases.changed):
        for other in others:
            torch.testing.assert_close(other, first)
        assert text.startswith("ConfigMismatch: "), text
        texts.append(text)
    # A rank that looks after its peer has raised names the peer instead.
    assert any("dispatch" in text and "max_tokens: got" in text for text in texts), texts


def test_training_after_evaluation(make_ranks: MakeRanks) -> None:
    for first, *others in make_ranks("shm", 2).run(cases.after_evaluation):
        for other in others:
            torch.testing.assert_close(other, first, **BITWISE)


def test_layers_with_different_numbers_share_a_buffer(make_ranks: MakeRanks) -> None:
    for many, one in make_ranks("shm", 2).run(cases.sharing):
        torch.testing.assert_close(many, one)


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_a_backward_that_ends_early_refuses_one_step(make_ranks: MakeRanks, how: str) -> None:
    """Every rank refuses the next step, whether all backwards ended early or one did; then they go on."""
    errors = make_ranks("shm", 2).run(cases.ended_backward, how)
    kind = "ZeroDivisionError" if how == "error" else "KeyboardInterrupt"
    assert [texts[1].split(":")[0] for texts in errors] == ([kind] * 2 if how == "error" else [kind, ""])
    for texts in errors:
        assert texts[2].startswith("InvalidInput"), texts
        assert (texts[0], texts[3]) == ("", ""), texts
    assert "of layer tag" in errors[0][2]
