"""Refusals of calls that torch's dispatcher, autograd or a graph would make wrong, before any op is announced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec
from moe_rt.engine import checks
from moe_rt.engine.token_window import TokenWindows
from moe_rt.errors import Op

NUM_TAGS = 1 << _engine.TAG_BITS  # a layer's tag travels in TAG_BITS bits


class Requirements(ABC):
    """Checks that an engine makes of a call. Every refusal is announced, so that all ranks raise."""

    spec: BufferSpec
    rank: int
    device: torch.device
    _windows: TokenWindows | None

    @abstractmethod
    def _refuse_input(self, op: Op, tag: int, message: str, got: int = 0, expected: int = 0) -> NoReturn:
        """Announce that this rank refuses the op because of its input, then raise InvalidInput with the message."""

    def require_call(self, op: Op, tag: int, max_tokens: Any = None, **tensors: Any) -> None:
        """Refuse arguments that torch's dispatcher would reject before the engine sees them: peers would wait."""
        if not isinstance(tag, int | torch.SymInt) or not 0 <= tag < NUM_TAGS:
            self._refuse_input(op, 0, checks.tag_problem(tag))
        if max_tokens is not None and not isinstance(max_tokens, int | torch.SymInt):
            most = self.spec.num_max_tokens_per_rank
            self._refuse_input(Op.DISPATCH, tag, checks.bound_problem(max_tokens, most))
        for name, t in tensors.items():
            if problem := checks.operand_problem(t, self.device):
                self._refuse_input(op, tag, f"{name}: {problem}")

    def codes_and_scales(self, tag: int, x: Any, coded: Any) -> tuple[Tensor, Tensor | None]:
        """Return the codes, or rows to encode, and the scales of a dispatch that delivers codes."""
        if problem := checks.codes_problem(x, coded):
            self._refuse_input(Op.DISPATCH, tag, problem)
        return x if isinstance(x, tuple) else (x, None)

    def refuse_handle(self, handle: Any) -> NoReturn:
        """Refuse a combine whose handle is not a Handle."""
        message = f"handle: got a {type(handle).__name__}, expected the Handle that dispatch returned with these rows"
        self._refuse_input(Op.COMBINE, 0, message)

    def require_no_grad(self, tag: int, *tensors: Any) -> None:
        """Refuse a combine with out= that would lose a gradient, as torch does; peers may record none."""
        if checks.is_recorded(*tensors):
            message = "out: got a combine that gradients are recorded of, expected torch.no_grad(), or no out"
            self._refuse_input(Op.COMBINE, tag, message)

    def require_no_grad_through_codes(self, tag: int, *tensors: Any) -> None:
        """Refuse a dispatch of codes that would lose a gradient; peers may record none."""
        if checks.is_recorded(*tensors):
            got = "codes, or coded=True, in a dispatch that gradients are recorded of"
            message = f"x: got {got}, expected torch.no_grad(), as codes have none"
            self._refuse_input(Op.DISPATCH, tag, message)

    def refuse_recorded_window(self, tag: int, x: Tensor, *_: Tensor) -> None:
        """Refuse x if it is in a token window, whose rows later ops overwrite. The caller has found that gradients or
        tangents are wanted."""
        if self._windows is not None and self._windows.hold(x):
            got = "a token window in a dispatch that gradients are recorded of"
            message = f"x: got {got}, expected torch.no_grad(), or rows in memory of their own: windows are overwritten"
            self._refuse_input(Op.DISPATCH, tag, message)

    def require_begin(self, tag: int, x: Tensor, *others: Tensor) -> None:
        """Refuse a dispatch in halves like a whole one that would lose gradients of a token window."""
        if checks.is_recorded(x, *others):
            self.refuse_recorded_window(tag, x)

    def require_window_as_handed_out(self, tag: int, x: Tensor) -> None:
        """Refuse rows that a graph has copied: it writes its inputs at its end, when peers may read the next op's."""
        if self._windows is not None and self._windows.is_elsewhere(x):
            got = "rows that a graph has copied from a token window, or that are not in it"
            message = f"x: got {got}, expected token_window to be written and dispatched outside of torch.compile"
            self._refuse_input(Op.DISPATCH, tag, message)
