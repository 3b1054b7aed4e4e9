"""Ops in two halves: one announces the op and returns, the other waits for the peers and receives.

One op is under way at a time, because a rank may write a window again only after it has received all signals of the op
before (docs/protocol.md). A call in between first ends the op under way, then is refused on every rank.
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

    _begun: Begun | None = None  # the op under way, or the last one that was ended by another call

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
        begun = self._begun
        if begun is None or begun.method != method or begun.ticket.data_ptr() != ticket.data_ptr():
            last = "none is under way" if begun is None else f"{begun} is under way"
            raise InvalidInput(f"wait: got an op that was waited for already, or lost ({last}); expected one wait each")
        self._end_begun(begun)
        self._begun = None
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
        if self._begun is not None:
            self._refuse_second(begun.op, tag)
        self._run_first(begun)
        self._begun = begun

    def _end_begun(self, begun: Begun) -> None:
        """Run the second half, and keep its error for the caller that waits."""
        if begun.ended:
            return
        try:
            self._run_second(begun)
        except ConcurrentUse:  # another thread waits for it
            raise
        except MoeRtError as error:
            begun.error = error.with_traceback(None)  # whose frames would keep this engine
        begun.ended = True

    def _refuse_second(self, op: Op, tag: int) -> None:
        """End an op that is under way, and refuse on every rank the call that came before its wait."""
        begun = self._begun
        if begun is None or begun.ended:
            return
        self._end_begun(begun)
        called = f"got {op.name.lower()} while {begun} was begun and not waited for"
        self._refuse_input(op, tag, f"wait: {called}, expected its wait() first")

    def _require_none_begun(self) -> None:
        if self._begun is not None and not self._begun.ended:
            raise InvalidInput(f"token_window: got a call while {self._begun} is under way, expected its wait() first")

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
