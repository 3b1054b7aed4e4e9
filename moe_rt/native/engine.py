"""Base class of the engines: makes outputs, fills arguments, and names an engine by an integer.

An engine runs the four ops over its heap; dispatch is in dispatching.py. Machines differ in a few hooks, which this
class calls: where outputs come from, how an op is run, whether capacity grows, and how this rank refuses an op.
"""

from __future__ import annotations

import itertools
import zlib
from abc import abstractmethod
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moe_rt import _engine
from moe_rt.config.spec import ELEMENTS, BufferSpec
from moe_rt.diagnostics.report import Report
from moe_rt.errors import Code, GroupClosed, InvalidConfig, InvalidInput, MoeRtError, Op, TooManyTokens
from moe_rt.heap.segments import Segments
from moe_rt.native.checks import NUM_TAGS
from moe_rt.native.dispatching import Dispatching
from moe_rt.native.storage import blank
from moe_rt.native.token_window import TokenWindows

# Plain integers: converting an enumerator takes C++ longer than all other fields together.
_COMBINE, _DISPATCH_BACKWARD = int(Op.COMBINE), int(Op.DISPATCH_BACKWARD)
_Given: TypeAlias = tuple[Tensor, Any, Tensor, Tensor]  # rows, weights or None, recv_plan, send_plan
_ids = itertools.count(1)
_engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()


class Engine(Dispatching):
    """One rank's engine. Ops name it by `id`, an integer that a traced graph can hold."""

    _segments: Segments
    pushes: ClassVar[bool]  # routing writes lists and rows of small batches into the receiver's segment
    vector_bytes: ClassVar[int] = 1  # alignment that inputs need

    def __init__(self, spec: BufferSpec, rank: int, device: torch.device, timeout_s: float) -> None:
        self.spec, self.rank, self.device, self.timeout_s = spec, rank, device, timeout_s
        self.num_local_experts = spec.placement.num_local(rank)
        self._capacities = {spec.num_max_tokens_per_rank: spec.capacity(rank)}  # rows of recv_x, by max_tokens
        self.shape = spec.shape(pushes=self.pushes)  # sizes of the segments
        self.plan_ints = self.shape.recv_plan_ints(self.num_local_experts)
        self.ids_at = self.shape.recv_ids_at(self.num_local_experts)
        self.by_token = spec.by_token
        self.num_parts = spec.num_ranks if spec.by_token else self.num_local_experts  # parts of recv_x
        self._acc_dtype = spec.acc_dtype
        self._reader = _engine.TensorReader(
            tensor=Tensor,
            shape=self.shape,
            elem=ELEMENTS[spec.dtype],
            plan_ints=self.plan_ints,
            on_cuda=device.type == "cuda",
            device_index=device.index or 0,
            vector_bytes=self.vector_bytes,
        )
        self._windows: TokenWindows | None = None  # None until a producer asks for one
        # torch.compile caches graphs by their source text. The engine id must therefore encode everything that decides
        # an op's output shapes, and differ from the ids of graphs made before compilers kept all ops.
        shapes = repr((spec.hash(), rank, self.capacity, self.plan_ints, "all ops kept")).encode()
        self.id = next(_ids) << 32 | zlib.crc32(shapes)
        _engines[self.id] = self

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, tag: int,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """y [N, H], recv_weights [capacity] or None -> out [T, H]; N may be less than capacity."""
        plans = recv_plan, send_plan
        if (recv_weights is None) is not self.by_token:
            self._check_plans(Op.COMBINE, tag, *plans)
            self._refuse_weights(Op.COMBINE, tag)
        given, sizes = self._returned(Op.COMBINE, tag, ("y", "recv_weights"), (y, recv_weights, *plans))
        y, recv_weights, recv_plan, send_plan = given
        num_rows, capacity, num_tokens = sizes
        if out is None:
            written = self._rows(num_tokens, y)
        else:
            self._check_out(Op.COMBINE, tag, out, num_tokens, (recv_plan, send_plan))
            written = self._writable(out)
        args = _engine.CombineArgs(
            op=_COMBINE,
            y=y.data_ptr(),
            recv_weights=0 if recv_weights is None else recv_weights.data_ptr(),
            grad_recv_weights=0,
            num_rows=num_rows,
            capacity=capacity,
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
            num_tokens=num_tokens,
            out=written.data_ptr(),
            grad_topk_weights=0,
        )
        self._run(Op.COMBINE, args, tag)
        if out is None:
            return written
        if written is not out:
            return out.copy_(written)
        if not out.is_inference():  # inference tensors count no versions
            increment_version(out)
        return out

    def dispatch_backward(
        self, grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients of recv_x [capacity, H] and recv_weights -> grad_x [T, H], grad_topk_weights [T, K]."""
        op, names = Op.DISPATCH_BACKWARD, ("grad_recv_x", "grad_recv_weights")
        given, sizes = self._returned(op, tag, names, (grad_recv_x, grad_recv_weights, recv_plan, send_plan))
        grad_recv_x, grad_recv_weights, recv_plan, send_plan = given
        num_rows, capacity, num_tokens = sizes
        grad_x = self._rows(num_tokens, grad_recv_x)
        grad_topk_weights = grad_recv_weights.new_empty(num_tokens, self.spec.num_topk)
        args = _engine.CombineArgs(
            op=_DISPATCH_BACKWARD,
            y=grad_recv_x.data_ptr(),
            recv_weights=0,
            grad_recv_weights=grad_recv_weights.data_ptr(),
            num_rows=num_rows,
            capacity=capacity,
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
            num_tokens=num_tokens,
            out=grad_x.data_ptr(),
            grad_topk_weights=grad_topk_weights.data_ptr(),
        )
        self._run(op, args, tag)
        return grad_x, grad_topk_weights

    def _returned(self, op: Op, tag: int, names: tuple[str, str], given: _Given) -> tuple[_Given, tuple[int, int, int]]:
        """Check the inputs of a combine-type op. Return them as C++ reads them, and their rows, weights and tokens."""
        sizes = self._reader.combine(*given) if type(tag) is int and 0 <= tag < NUM_TAGS else None
        if sizes is not None:
            return given, sizes
        rows, weights, recv_plan, send_plan = given
        self._check_plans(op, tag, recv_plan, send_plan)
        num_rows, capacity = self._check_rows(op, tag, names[0], rows, names[1], weights)
        if weights is not None:
            weights = self._input(weights)
        given = self._input(rows), weights, recv_plan.contiguous(), send_plan.contiguous()
        return given, (num_rows, capacity, send_plan.shape[0])

    def combine_backward(
        self, grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """grad_out [T, H], y [N, H], recv_weights [capacity] -> grad_y [N, H], grad_recv_weights [capacity]."""
        op = Op.COMBINE_BACKWARD
        num_tokens = self._check_grad_out(op, tag, grad_out, recv_plan)
        grad_out, recv_plan = self._input(grad_out), recv_plan.contiguous()
        if self.by_token:
            self._refuse_weights(op, tag)
        num_rows, capacity = self._check_rows(op, tag, "y", y, "recv_weights", recv_weights)
        y, recv_weights = self._input(y), self._input(recv_weights)
        grad_y = blank(self._rows(num_rows, y))
        grad_recv_weights = blank(torch.empty_like(recv_weights))
        args = _engine.CombineBackwardArgs(
            grad_out=grad_out.data_ptr(),
            num_tokens=num_tokens,
            y=y.data_ptr(),
            recv_weights=recv_weights.data_ptr(),
            num_rows=num_rows,
            capacity=capacity,
            recv_plan=recv_plan.data_ptr(),
            grad_y=grad_y.data_ptr(),
            grad_recv_weights=grad_recv_weights.data_ptr(),
        )
        self._run(op, args, tag)
        return grad_y, grad_recv_weights

    def combine_tokens_backward(self, grad_out: Tensor, recv_plan: Tensor, num_rows: int, tag: int) -> Tensor:
        """grad_out [T, H] -> grad_y [num_rows, H] for rows of tokens: each is its token's row of grad_out."""
        op = Op.COMBINE_BACKWARD
        num_tokens = self._check_grad_out(op, tag, grad_out, recv_plan)
        grad_out, recv_plan = self._input(grad_out), recv_plan.contiguous()
        if not self.by_token:
            self._refuse_weights(op, tag)
        grad_y = blank(self._rows(num_rows, grad_out))
        args = _engine.CombineBackwardArgs(
            grad_out=grad_out.data_ptr(),
            num_tokens=num_tokens,
            y=0,
            recv_weights=0,
            num_rows=num_rows,
            capacity=_engine.ANY_CAPACITY,
            recv_plan=recv_plan.data_ptr(),
            grad_y=grad_y.data_ptr(),
            grad_recv_weights=0,
        )
        self._run(op, args, tag)
        return grad_y

    def token_window(self, num_tokens: int, compiled: bool = False) -> Tensor:
        """Return [num_tokens, H] for the next op, or ordinary memory if `compiled`; see moe_rt.Buffer.token_window."""
        self.health()
        s = self.spec
        if s.dispatch_dtype is not None:
            got, expected = (
                f"a buffer with dispatch_dtype={s.dispatch_dtype}",
                "None: rows are coded on their way there",
            )
            raise InvalidConfig(f"token_window: got {got}, expected {expected}", rank=self.rank)
        most = s.num_max_tokens_per_rank
        if type(num_tokens) is not int or not 0 <= num_tokens <= most:
            message = f"num_tokens: got {num_tokens!r}, expected an integer in [0, num_max_tokens_per_rank = {most}]"
            raise InvalidInput(message, rank=self.rank)
        window = self._next_window()
        if window is None:
            got = "a stream that is being captured, or a buffer whose ops were, in a CUDA graph"
            message = f"token_window: got {got}, expected neither: only the device knows which window a replay takes"
            raise InvalidConfig(message, rank=self.rank)
        if compiled:
            return self._matrix(num_tokens, s.hidden, s.dtype)
        if self._windows is None:
            segments, begin = self._segments, self._segments.addresses[self.rank]
            self._windows = TokenWindows(s, self.shape, begin, self.device, list(segments.mappings))
            self._reader.avoid(begin=begin, end=begin + self.shape.segment_bytes())
        return self._windows.hand_out(window, num_tokens)

    @abstractmethod
    def health(self) -> None:
        """Raise the error that ended the group, if any. Never blocks."""

    @abstractmethod
    def timings(self) -> dict[str, Any]:
        """Durations of the last op's phases; see moe_rt.Buffer.timings."""

    @abstractmethod
    def report(self) -> Report:
        """Report what every rank of the group is doing; see moe_rt.Buffer.report."""

    @abstractmethod
    def waited_ns(self) -> list[int]:
        """Time that this rank has waited for each peer so far; see moe_rt.Buffer.waited_ns."""

    @abstractmethod
    def poison(self, error: BaseException | None = None) -> None:
        """End the group on every rank because of `error`. CPU ranks leave its text for their peers."""

    @abstractmethod
    def close(self, why: str = "") -> None:
        """Announce that this rank has closed, refuse further ops and release the segments. Local, idempotent.

        `why` is the reason that CPU ranks give to peers still waiting for it, if its buffer was not closed explicitly.
        """

    def _writable(self, out: Tensor) -> Tensor:
        """Return the tensor that C++ writes: `out`, or a fresh one that is then copied into it."""
        return out


def refusal_code(error: MoeRtError) -> Code:
    """Status code that peers receive if this rank refuses its input with `error`."""
    return Code.TOO_MANY_TOKENS if isinstance(error, TooManyTokens) else Code.INVALID_INPUT


def engine_by_id(engine_id: int) -> Engine:
    """Return the engine that an op was recorded with. Raise GroupClosed if its buffer no longer exists."""
    engine = _engines.get(engine_id)
    if engine is None:
        raise GroupClosed(f"buffer {engine_id}: got an op on a buffer that no longer exists, expected an open one")
    return engine
