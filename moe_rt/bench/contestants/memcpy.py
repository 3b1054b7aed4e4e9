"""The limit: copying as many bytes as the op has to move, in the same processes, with nothing to find out first."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_rt.bench.cases import Case
from moe_rt.bench.contestants.base import Contestant
from moe_rt.bench.expect import Expectation
from moe_rt.bench.inputs import Inputs
from moe_rt.bench.step import Step, Unavailable, WrongOutput
from moe_rt.bench.world import World


class Memcpy(Contestant):
    """dispatch: N rows, each copied from one of this rank's T. combine, pair: one memmove, sized by `Traffic.limit`.

    Pages are present and huge where allowed, and the destination is as warm as the last iteration left it.
    """

    name = "memcpy"

    def __init__(self, case: Case, world: World) -> None:
        if case.op == "layer":
            raise Unavailable("a layer is no copy")
        super().__init__(case, world)

    def steps(self, inputs: Sequence[Inputs], expect: Expectation) -> list[Step]:
        rows = expect.traffic()[self.world.rank].limit(self.case.op)
        num_bytes = round(rows * self.case.row_bytes)  # none where routing leaves this rank out
        target = _present(num_bytes)
        if self.case.op == "dispatch":
            return [self._rows_step([tokens.x for tokens in inputs], target)]
        source = _present(num_bytes)
        source.random_()
        to, start = target.data_ptr(), source.data_ptr()

        def check(_: int, output: object) -> None:
            if not torch.equal(source, target):
                raise WrongOutput(f"rank {self.world.rank}: the copy differs from its source")

        return [Step(lambda i: ctypes.memmove(to, start, num_bytes), check)]

    def _rows_step(self, xs: list[Tensor], target: Tensor) -> Step:
        # numpy's take moves every row with memmove, in one call; rows as int16 are the same bytes.
        sources = [x.view(torch.int16).numpy() for x in xs]
        out = target.view(torch.int16).view(-1, sources[0].shape[1]).numpy()
        index = np.arange(len(out)) % len(sources[0])

        def run(i: int) -> None:
            np.take(sources[i % len(sources)], index, axis=0, out=out, mode="clip")

        def check(i: int, output: object) -> None:
            if not (out == sources[i % len(sources)][index]).all():
                raise WrongOutput(f"rank {self.world.rank}: the copied rows differ from their sources")

        return Step(run, check)


def _present(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] whose pages are there, huge ones if the machine gives them."""
    block = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8).fill_(1)[:num_bytes]
