"""Device primitives use memory and network no more than necessary: rows are read once, and a warp calls quiet once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.cpp_programs import compile_program
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.rounds import one_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, _engine
from moe_rt.engine.gpu.driver import Launches
from moe_rt.engine.gpu.launcher import Launcher


def test_reads_and_quiets() -> None:
    program = compile_program(Path(__file__).with_name("primitives.cpp"), "-O1")
    result = subprocess.run([program], capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stdout


def test_scratch_has_room_for_whatever_a_launch_lays_out() -> None:
    """Scratch fits the layout of a rank with all experts: a count and an offset for each expert and source."""
    ranks, experts = 8, 256
    shape = make_spec(ranks, num_experts=experts).shape(pushes=True)
    assert _engine.scratch_bytes(shape, [0] * experts, 0, 32) >= 4 * 2 * experts * ranks


def round_with(group: Any, tokens: list[int], num_sms: int | None) -> None:
    spec = make_spec(len(tokens))
    with Buffer(group, timeout_s=60.0, num_sms=num_sms, **buffer_kwargs(spec)) as buffer:
        one_round(buffer, make_inputs(spec, tokens, seed=4), seed=4)


@pytest.mark.parametrize("num_sms", [1, 2, 3, None])
@pytest.mark.parametrize("tokens", [[12], [12, 0, 7], [1, 1, 1], [12, 9, 0, 5, 11]], ids=str)
def test_a_launch_that_routes_is_no_larger_than_others(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], num_sms: int | None
) -> None:
    """A launch that routes has no more blocks than others, to avoid a second wave, and at least two."""
    launched: list[tuple[str, int, int]] = []
    launch = Launcher.launch

    def noted(self: Launcher, launches: Launches, stream: int) -> None:
        launched.extend((name, blocks, self.max_blocks) for name, blocks in launches)
        launch(self, launches, stream)

    monkeypatch.setattr(Launcher, "launch", noted)
    gpu = EmulatedGpu(num_sms=24)
    ThreadRanks(len(tokens), gpu).run(round_with, tokens, num_sms)
    sends = [(blocks, most) for name, blocks, most in launched if name == "dispatch_send"]
    assert len(sends) == len(tokens)
    assert all(2 <= blocks <= max(2, most) for blocks, most in sends), sends
