"""The CPU engine for tensors: outputs from recycled memory, ops in the calling thread, statuses turned into exceptions.

Input that this rank refuses is refused together: the engine announces the refusal, so that every rank raises in the
same op and none waits for rows that will never come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.config import ELEMENTS, WIRES, BufferSpec
from moe_rt.errors import CapacityOverflow, Code, MoeRtError, Op, error_from_status
from moe_rt.heap.segments import Segments
from moe_rt.native.engine import REFUSAL_CODES, Engine
from moe_rt.native.storage import Recycler


class CpuEngine(Engine):
    """A rank that is a process over shared memory, or a thread."""

    def __init__(
        self, spec: BufferSpec, rank: int, segments: Segments, *, timeout_s: float, num_threads: int, isa: str
    ) -> None:
        super().__init__(spec, rank, torch.device("cpu"), timeout_s)
        self._segments = segments
        self._memory = Recycler()
        self._capacities = [spec.capacity(r) for r in range(spec.num_ranks)]
        self._engine = _engine.Engine(
            shape=spec.shape(),
            elem=ELEMENTS[spec.dtype],
            rank=rank,
            config_hash=spec.hash(),
            expert_rank=list(spec.placement),
            capacity=self._capacities,
            segments=segments.addresses,
            pidfds=segments.pidfds,
            timeout_s=timeout_s,
            dispatch_wire=WIRES[spec.dispatch_dtype],
            combine_wire=WIRES[spec.combine_dtype],
            drop_overflow=spec.overflow == "drop",
            num_lanes=num_threads,
            isa=isa,
        )
        self._ops: dict[Op, Callable[..., _engine.Status]] = {
            Op.DISPATCH: self._engine.dispatch,
            Op.COMBINE: self._engine.combine,
            Op.DISPATCH_BACKWARD: self._engine.combine,
            Op.COMBINE_BACKWARD: self._engine.combine_backward,
        }

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As Engine.dispatch. All ranks see the same overflow and the same need, so all retry alike, and once."""
        try:
            return super().dispatch(x, topk_idx, topk_weights, tag)
        except CapacityOverflow:
            if self.spec.overflow != "retry":
                raise
        self._capacities = [max(c, n) for c, n in zip(self._capacities, self._engine.needed_rows(), strict=True)]
        self._engine.set_capacity(self._capacities)
        self.capacity = self._capacities[self.rank]
        self._rows_shape = (self.capacity, self.spec.hidden)
        return super().dispatch(x, topk_idx, topk_weights, tag)

    def _rows(self, shape: tuple[int, int]) -> Tensor:
        return self._memory.empty(shape, self.spec.dtype)

    def _run(self, op: Op, words: tuple[int, ...], tag: int) -> None:
        status = self._ops[op](*words, tag)
        if status.code:
            self._raise(status)

    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        """Announces the refusal, then raises `error` here; a failed group is raised instead, caused by `error`."""
        status = self._engine.refuse(op, REFUSAL_CODES[type(error)], got, expected, tag)
        if status.code >= Code.CONFIG_MISMATCH:
            raise error_from_status(status, self.rank, self.timeout_s) from error
        raise error

    def health(self) -> None:
        status = self._engine.health()
        if status.code:
            self._raise(status)

    def timings(self) -> dict[str, Any]:
        op, before, wait, after, arrivals = self._engine.timings()
        names = {"op": Op(op).name.lower(), "before_ns": before, "wait_ns": wait, "after_ns": after}
        return {**names, "arrival_ns": arrivals}

    def waited_ns(self) -> list[int]:
        return self._engine.waited_ns()

    def poison(self) -> None:
        self._engine.poison(Code.POISONED, -1)

    def close(self) -> None:
        """As Engine.close; silent in a forked child.

        While another thread is inside an op the segments stay mapped: they go with the engine, which the op holds.
        """
        if self._engine.close():
            self._segments.release()

    def _raise(self, status: _engine.Status) -> NoReturn:
        raise error_from_status(status, self.rank, self.timeout_s)
