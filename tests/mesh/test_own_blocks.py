"""A rank loads the entries of its experts from a file of all experts or of its experts, and refuses others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_rt.errors import InvalidConfig
from moe_rt.nn.blocks import check_held, mark_states, note_mesh_block, own_block, take_own_block
from moe_rt.nn.part import Part, Whole, as_part

ROWS = torch.arange(12.0).reshape(6, 2)
HERE = (4, 1)
WHOLE = Whole("experts", HERE, 6)


def holder(**changes: Any) -> Any:
    return SimpleNamespace(**{"over_mesh": False, "expert_ids": HERE, "num_experts": 6, **changes})


def rows_of(ids: tuple[int, ...]) -> Tensor:
    return as_part(ROWS[list(ids)], Whole("experts", ids, 6))


def test_entries_of_own_experts_are_taken_from_all() -> None:
    p = torch.zeros(2, 2)
    assert torch.equal(take_own_block("w", ROWS, p, holder()), ROWS[[4, 1]])
    for own in (ROWS[:2], rows_of(HERE)):
        assert take_own_block("w", own, p, holder()) is own
    only = holder(expert_ids=tuple(range(6)))  # of all experts, in order
    assert take_own_block("w", ROWS, torch.zeros(6, 2), only) is ROWS


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (rows_of((4, 2)), r"experts \[4, 2\]"),
        (rows_of((1, 4)), r"experts \[1, 4\]"),
        (ROWS[:3], "3 experts"),
        (ROWS[:1], "1 experts"),
    ],
    ids=["other", "order", "more", "fewer"],
)
def test_entries_of_other_experts_are_refused(got: Tensor, said: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"^w: got {said}, expected this rank's, \[4, 1\], or all"):
        take_own_block("w", got, torch.zeros(2, 2), holder())


@pytest.mark.parametrize(
    ("got", "parameter", "changes"),
    [
        ("not a tensor", torch.zeros(2, 2), {}),
        (torch.tensor(1.0), torch.zeros(2, 2), {}),
        (ROWS[:3], torch.zeros(3, 2), {}),
        (ROWS[:3], torch.zeros(2, 2), {"expert_ids": ()}),
    ],
    ids=["no tensor", "scalar", "no entry for each expert", "unknown experts"],
)
def test_what_has_no_entry_for_each_expert_is_left_to_torch(got: Any, parameter: Tensor, changes: Any) -> None:
    assert take_own_block("w", got, parameter, holder(**changes)) is got


def test_long_lists_of_experts_are_shortened() -> None:
    for count, said in ((8, r"\[0, 1, 2, 3, 4, 5, 6, 7\]"), (9, r"\[0, 1, \.\.\. 8\]")):
        with pytest.raises(InvalidConfig, match=rf"expected this rank's, {said}, or all"):
            own_block("w", torch.zeros(3), None, range(count), 20)


@pytest.mark.parametrize("saved", [[4, 1], [0, 1, 2, 3, 4, 5]], ids=str)
def test_recorded_experts_are_own_or_all(saved: list[int]) -> None:
    check_held("w", saved, holder())


@pytest.mark.parametrize("saved", [[1, 4], [4], [0, 1, 2, 3, 4], [1, 0, 2, 3, 4, 5], []], ids=str)
def test_other_recorded_experts_are_refused(saved: list[int]) -> None:
    with pytest.raises(InvalidConfig, match=r"^w: got experts \["):
        check_held("w", saved, holder())


class Block:
    """A DTensor's place in its mesh."""

    def __init__(self, coordinate: list[int] | None) -> None:
        self.device_mesh = SimpleNamespace(get_coordinate=lambda: coordinate)


def test_blocks_of_a_mesh_keep_their_place() -> None:
    saved, none, plain = Block([1, 0]), Block(None), ROWS.clone()
    for block in (saved, none, plain, None):
        note_mesh_block(block)
    assert saved.moe_rt_block == [1, 0]  # type: ignore[attr-defined]
    assert not hasattr(none, "moe_rt_block")
    assert not hasattr(plain, "moe_rt_block")
    over_mesh: Any = holder(over_mesh=True)
    parameter: Any = Block([1, 0])
    for got in (saved, plain):
        assert take_own_block("w", got, parameter, over_mesh) is got
    parameter = Block([0, 1])
    with pytest.raises(InvalidConfig, match=r"^w: got the block at \[1, 0\] of the mesh, expected the one at \[0, 1\]"):
        take_own_block("w", saved, parameter, over_mesh)


def test_loaded_states_are_cut_to_own_experts() -> None:
    part, plain = Part(torch.zeros(2, 2), True, WHOLE), nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([part, plain], lr=0.1)
    step, marked = torch.tensor(3.0), rows_of(HERE)
    optimizer.state[part] = {
        "step": step,
        "note": "text",
        "mean": ROWS,
        "own": ROWS[:2],
        "marked": marked,
        "row": ROWS[0],
    }
    optimizer.state[plain] = {"mean": ROWS[:2]}
    mark_states(optimizer)
    state: Any = optimizer.state[part]
    assert (state["step"] is step, state["note"], state["marked"] is marked) == (True, "text", True)
    for name, value in (("mean", ROWS[[4, 1]]), ("own", ROWS[:2]), ("row", ROWS[0])):
        assert isinstance(state[name], Part)
        assert torch.equal(state[name].to_local(), value)
    assert type(optimizer.state[plain]["mean"]) is Tensor
    optimizer.state[part] = {"mean": ROWS[:3]}
    with pytest.raises(InvalidConfig, match=r"^optimizer state mean: got 3 experts"):
        mark_states(optimizer)


def test_loaded_states_of_every_group_of_parameters_are_cut() -> None:
    parts = [Part(torch.zeros(2, 2), True, WHOLE) for _ in range(4)]
    optimizer = torch.optim.SGD([{"params": parts[:2]}, {"params": parts[2:]}], lr=0.1)
    for part in parts:
        optimizer.state[part] = {"mean": ROWS, "square": ROWS}
    mark_states(optimizer)
    for part in parts:
        for value in optimizer.state[part].values():
            assert torch.equal(value.to_local(), ROWS[[4, 1]])
