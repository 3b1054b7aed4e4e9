"""The reference: copying as many bytes as the op has to move, on the same processor, without any routing."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Contestant, Step, Unavailable
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.inputs import Inputs
from moe_rt.lab.bench.world import World
from moe_rt.lab.testing.rounds import WrongOutput


class Memcpy(Contestant):
    """dispatch: N rows, each copied from one of this rank's T. combine, pair: one copy, sized by `Traffic.copied_rows`.

    GPU ranks use torch's copies within the GPU's memory. CPU ranks use memmove, through numpy and ctypes, on pages that
    are present, and huge if allowed. The destination is as warm as the last iteration left it.
    """

    name = "memcpy"

    def __init__(self, case: Case, world: World) -> None:
        if case.op == "layer":
            raise Unavailable("a layer is no copy")
        super().__init__(case, world)

    def steps(self, inputs: Sequence[Inputs], expect: Expectation) -> list[Step]:
        device = self.world.processor.device
        rows = expect.traffic()[self.world.rank].copied_rows(self.case.op)
        num_bytes = round(rows * self.case.row_bytes)  # 0 if routing sends nothing to this rank
        target = _present(num_bytes, device)
        if self.case.op == "dispatch":
            return [self._rows_step([tokens.x for tokens in inputs], target)]
        source = _present(num_bytes, device).random_()
        copy = memmove(source, target) if device.type == "cpu" else partial(target.copy_, source)

        def check(_: int, output: object) -> None:
            if not torch.equal(source, target):
                raise WrongOutput(f"rank {self.world.rank}: the copy differs from its source")

        return [Step(lambda i: copy(), check)]

    def _rows_step(self, xs: list[Tensor], target: Tensor) -> Step:
        sources = [x.view(torch.int16) for x in xs]  # the same bytes, of a type that numpy has
        out = target.view(torch.int16).view(-1, sources[0].shape[1])
        index = torch.arange(len(out), device=out.device) % len(sources[0])
        select = take if out.device.type == "cpu" else index_select
        copies = [select(source, index, out) for source in sources]

        def check(i: int, output: object) -> None:
            if not torch.equal(out, sources[i % len(sources)][index]):
                raise WrongOutput(f"rank {self.world.rank}: the copied rows differ from their sources")

        return Step(lambda i: copies[i % len(copies)](), check)


def memmove(source: Tensor, target: Tensor) -> Callable[[], object]:
    return partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), len(source))


def take(source: Tensor, index: Tensor, out: Tensor) -> Callable[[], object]:
    """Copy every row with memmove, in one numpy call."""
    return partial(np.take, source.numpy(), index.numpy(), axis=0, out=out.numpy(), mode="clip")


def index_select(source: Tensor, index: Tensor, out: Tensor) -> Callable[[], object]:
    return partial(torch.index_select, source, 0, index, out=out)


def _present(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] with its pages present; huge pages on a CPU if the machine provides them."""
    if device.type != "cpu":
        return torch.ones(num_bytes, dtype=torch.uint8, device=device)
    block = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8).fill_(1)[:num_bytes]
