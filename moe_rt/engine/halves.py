"""Ops in two halves: one announces the op and returns, the other waits for the peers and receives.

As many ops as the buffer's depth may be under way, because a rank may write a window again only after it has received
all signals of an earlier op (docs/protocol.md). One call more first ends all of them, then is refused on every rank.
Ops end in the order in which they began: a wait, or a whole op, first ends the ops before.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial, partialmethod
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.engine.requirements import Requirements
from moe_rt.errors import CapacityOverflow, ConcurrentUse, InvalidInput, MoeRtError, Op

# The op's argument struct in cuda/protocol/core/args.h.
Args: TypeAlias = _engine.DispatchArgs | _engine.CombineArgs | _engine.CombineBackwardArgs


class Start(Protocol):
    """Starts an op, instead of running it; `used` are the tensors whose addresses are in `args`."""

    def __call__(self, args: Args, tag: int, *used: Tensor | None) -> None: ...


class Begun:
    """An op whose first half has run. It keeps the op's tensors alive until the second half has run.

    Attributes:
        method: the engine's method that runs the whole op.
        given: the arguments of that method.
        ticket: names the op in a graph, by its address; its value is never read.
    """

    op: Op
    args: Args
    tag: int
    used: tuple[Tensor | None, ...]
    outputs: Any
    launcher: Any = None  # of the channel in which it began on a GPU
    stream: Any = None  # the GPU's stream on which it began
    captured = False
    error: MoeRtError | None = None
    ended = False

    def __init__(self, op: Op, method: str, given: tuple[Any, ...], ticket: Tensor) -> None:
        self.op, self.method, self.given, self.ticket = op, method, given, ticket

    def __str__(self) -> str:
        return f"{self.op.name.lower()} of layer tag {self.tag}"


class Halves(Requirements):
    """The halves of the ops of an engine."""

    # Ops without a wait so far, in the order in which they began: first the ended ones, which other calls have ended,
    # then the ones under way. An ended one is forgotten once as many ops have begun as may be under way.
    _begun: tuple[Begun, ...] = ()

    def begin(self, op: Op, method: str, *given: Any) -> Tensor:
        """Run the first half of an op, whose whole is `method` with the arguments `given`. Return its ticket."""
        return self.under_way(op, method, *given).ticket

    def under_way(self, op: Op, method: str, *given: Any, **options: Any) -> Begun:
        """Run the first half of an op as `begin`. Return the op with its outputs, which `finish` fills."""
        # Autograd's nodes of the caller's tensors keep the engine, which keeps these: a circle that nothing collects.
        kept = tuple(each.detach() if isinstance(each, Tensor) else each for each in given)
        ticket = torch.empty(1, dtype=torch.int32, device=self.device)
        begun = Begun(op, method, kept, ticket)
        begun.outputs = getattr(self, method)(*kept, **options, start=partial(self._start, begun))
        return begun

    def finish(self, method: str, ticket: Tensor, *_: Any) -> Any:
        """Run the second half of the op with this ticket, and return what `method` returns.

        Raises:
            InvalidInput: the op is not under way. Also what `method` raises.
        """
        named = [b for b in self._begun if b.method == method and b.ticket.data_ptr() == ticket.data_ptr()]
        if not named:
            left = ", ".join(map(str, self._begun)) or "none"
            message = f"wait: got an op that was waited for already, or lost ({left} under way); expected one wait each"
            raise InvalidInput(message, rank=self.rank)
        (begun,) = named
        self._end_ops(self._begun[: self._begun.index(begun) + 1])
        self._begun = tuple(b for b in self._begun if b is not begun)
        if isinstance(begun.error, CapacityOverflow) and self._grow(
            begun.given[-1] or self.spec.num_max_tokens_per_rank
        ):
            x, *others = begun.given
            return getattr(self, method)(x.clone(), *others)  # all ranks repeat it; x may be an earlier op's window
        if isinstance(begun.error, CapacityOverflow):
            self._advise(begun.error, begun.given[2 if begun.method == "dispatch_scaled" else 1])
        if begun.error is not None:
            raise begun.error
        return begun.outputs

    def _start(self, begun: Begun, args: Args, tag: int, *used: Tensor | None) -> None:
        begun.args, begun.tag, begun.used = args, tag, used
        if self._begun:
            self._refuse_too_many(begun.op, tag)
        self._run_first(begun)
        self._begun = (*self._begun, begun)[-self.spec.depth :]

    def _end_ops(self, all_begun: tuple[Begun, ...]) -> None:
        """Run the second halves of ops that are under way, and keep their errors for the callers that wait."""
        for begun in all_begun:
            if begun.ended:
                continue
            try:
                self._run_second(begun)
            except ConcurrentUse:  # another thread waits for it
                raise
            except MoeRtError as error:
                begun.error = error.with_traceback(None)  # whose frames would keep this engine
            begun.ended = True

    def _end_before(self, op: Op, tag: int) -> None:
        """End the ops that are under way before a whole op."""
        self._refuse_too_many(op, tag)
        self._end_ops(self._begun)

    def _refuse_too_many(self, op: Op, tag: int) -> None:
        """Refuse a call on every rank, after the ops under way have ended, if these are as many as may be."""
        first = self._first_of_too_many()
        if first is None:
            return
        self._end_ops(self._begun)
        called = f"got {op.name.lower()} while {first} was begun and not waited for"
        self._refuse_input(op, tag, f"wait: {called}, expected its wait() first{self._allowed()}")

    def _require_place(self) -> None:
        first = self._first_of_too_many()
        if first is not None:
            called = f"got a call while {first} is under way"
            message = f"token_window: {called}, expected its wait() first{self._allowed()}"
            raise InvalidInput(message, rank=self.rank)

    def _first_of_too_many(self) -> Begun | None:
        """Return the first op under way if no other may begin."""
        under_way = [begun for begun in self._begun if not begun.ended]
        return under_way[0] if len(under_way) == self.spec.depth else None

    def _allowed(self) -> str:
        return "" if self.spec.depth == 1 else f": depth = {self.spec.depth} ops may be under way"

    @abstractmethod
    def _run_first(self, begun: Begun) -> None:
        """Run the first half: send and announce."""

    @abstractmethod
    def _run_second(self, begun: Begun) -> None:
        """Run the second half: wait and receive."""

    def _advise(self, error: CapacityOverflow, topk_idx: Tensor) -> None:
        """Add what the capacity risks to an overflow; GPUs are not asked for their routing."""
        if topk_idx.device.type == "cpu":
            from moe_rt.plan.routing import advice_of  # programs without an overflow do not load it

            if advice := advice_of(self.spec, topk_idx.numpy()):
                error.args = (f"{error.args[0]}; {advice}",)

    @abstractmethod
    def _grow(self, max_tokens: int) -> bool:
        """Increase the capacity for this bound to what the overflowed dispatch needed. False if capacity is fixed."""

    dispatch_begin = partialmethod(begin, Op.DISPATCH, "dispatch")
    dispatch_finish = partialmethod(finish, "dispatch")
    dispatch_scaled_begin = partialmethod(begin, Op.DISPATCH, "dispatch_scaled")
    dispatch_scaled_finish = partialmethod(finish, "dispatch_scaled")
    combine_begin = partialmethod(begin, Op.COMBINE, "combine")
    combine_finish = partialmethod(finish, "combine")
    dispatch_backward_begin = partialmethod(begin, Op.DISPATCH_BACKWARD, "dispatch_backward")
    dispatch_backward_finish = partialmethod(finish, "dispatch_backward")
    combine_backward_begin = partialmethod(begin, Op.COMBINE_BACKWARD, "combine_backward")
    combine_backward_finish = partialmethod(finish, "combine_backward")
    combine_tokens_backward_begin = partialmethod(begin, Op.COMBINE_BACKWARD, "combine_tokens_backward")
    combine_tokens_backward_finish = partialmethod(finish, "combine_tokens_backward")
