"""sums="invariant" in the trainer: up to the first all-reduce, a step has the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from train import cases_train as cases

MakeRanks = Callable[[str, int], Ranks]
CHANGES: dict[str, Any] = dict(sums="invariant", aux_loss_coef=0.0, z_loss_coef=0.0)


@pytest.fixture(scope="module")
def alone() -> Any:
    return cases.first_step(None, CHANGES)


@pytest.mark.parametrize("world", [2, 4])
def test_first_step(make_ranks: MakeRanks, alone: Any, world: int) -> None:
    """Logits and the experts' gradients are equal in bits; gradients of what all ranks hold are sums over ranks.

    The first operation that differs is therefore the all-reduce of `moe_rt.train.parallel.Gradients.average`, after
    which weights, and with them the losses from step 2 on, differ in their last bits.
    """
    parts = make_ranks("shm", world).run(cases.first_step, CHANGES)
    logits, experts, others = alone
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), logits)
    assert experts.keys() == parts[0][1].keys()
    for name, gradient in experts.items():
        np.testing.assert_array_equal(np.concatenate([part[1][name] for part in parts]), gradient, err_msg=name)
    for name, gradient in others.items():
        np.testing.assert_allclose(parts[0][2][name], gradient, rtol=1e-3, atol=1e-6, err_msg=name)
    assert any((parts[0][2][name] != gradient).any() for name, gradient in others.items())
