"""If a GPU refuses every launch, or is missing, the first error is raised and the buffer is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import GroupPoisoned, InvalidConfig, InvalidInput, LaunchFailed

SPEC = make_spec(1)


def inputs() -> list[Any]:
    made = make_inputs(SPEC, [12], seed=1, kind="topk")
    return [each[0] for each in (made.xs, made.topk_idx, made.topk_weights)]


class DyingGpu(EmulatedGpu):
    """The driver refuses every launch once `dead` is set."""

    dead = False

    def kernels(self, source: str, defines: Any, **how: Any) -> Any:
        kernels = super().kernels(source, defines, **how)
        launch = kernels.launch

        def refuse(launches: Any, **how: Any) -> None:
            if self.dead:
                name = launches[0][0]
                raise LaunchFailed(f"{name}: got CUDA_ERROR_ILLEGAL_ADDRESS from the CUDA driver, expected success")
            launch(launches, **how)

        kernels.launch = refuse  # type: ignore[method-assign]
        return kernels


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda buffer, mine: buffer.dispatch(*mine), LaunchFailed),
        (lambda buffer, mine: buffer.dispatch(mine[0][:, 1:], *mine[1:]), InvalidInput),
        (lambda buffer, mine: {}["weight"], KeyError),
    ],
    ids=["an op", "a refusal", "the caller's own"],
)
def test_a_dead_gpu_hides_no_error(act: Callable[[Buffer, Any], None], kind: type[Exception]) -> None:
    """The first error is raised and the buffer is closed, although poisoning the peers also fails."""
    gpu = DyingGpu()
    buffer = Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(SPEC))
    segments = buffer._engine._segments
    gpu.dead = True
    with pytest.raises(kind) as raised, buffer:
        act(buffer, inputs())
    assert type(raised.value) is kind
    assert "abort_group" not in str(raised.value)
    assert buffer.closed
    assert segments.addresses == [], "its memory is given back"


def test_a_launch_that_failed_ends_the_group() -> None:
    gpu = DyingGpu()
    with Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(SPEC)) as buffer:
        gpu.dead = True
        with pytest.raises(LaunchFailed):
            buffer.dispatch(*inputs())
        gpu.dead = False
        with pytest.raises(GroupPoisoned, match="CUDA_ERROR_ILLEGAL_ADDRESS") as raised:
            buffer.dispatch(*inputs())
    assert isinstance(raised.value.__cause__, LaunchFailed)


# The rest of torch's message depends on its build.
NO_GPU = "expected a CUDA device that torch can use; torch "


def test_no_gpu_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InvalidConfig, match=NO_GPU):
        Buffer(ThreadGroup.make(1, "cuda")[0], **buffer_kwargs(make_spec(1)))
    with pytest.raises(InvalidConfig, match=NO_GPU):
        Buffer(ThreadGroup.make(1)[0], heap="loopback", **buffer_kwargs(make_spec(1)))
