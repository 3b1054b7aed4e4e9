"""Base class of the engines: checks arguments, makes outputs, fills the ops' structs, names an engine by an integer.

An engine runs the four ops over its heap. Machines differ in a few hooks, which this class calls: where outputs come
from, how an op is run, whether capacity grows, and how this rank refuses an op. Wrong input is refused before an op is
announced, so that every rank raises.
"""

from __future__ import annotations

import itertools
import zlib
from abc import abstractmethod
from typing import Any, ClassVar, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, is_anomaly_enabled
from torch.autograd.graph import increment_version

from moe_rt import _engine
from moe_rt.config.codec import RowFormat
from moe_rt.config.spec import ELEMENTS, BufferSpec
from moe_rt.diagnostics.report import Report
from moe_rt.engine import checks
from moe_rt.engine.halves import Args, Halves, Start
from moe_rt.engine.requirements import NUM_TAGS
from moe_rt.engine.storage import blank
from moe_rt.engine.token_window import TokenWindows, require_window
from moe_rt.errors import CapacityOverflow, GroupClosed, InvalidInput, MoeRtError, Op, TooManyTokens
from moe_rt.memory.segments import Segments

# Plain integers: converting an enumerator takes C++ longer than all other fields together.
_COMBINE, _DISPATCH_BACKWARD = int(Op.COMBINE), int(Op.DISPATCH_BACKWARD)
_Given: TypeAlias = tuple[Tensor, Any, Tensor, Tensor]  # rows, weights or None, recv_plan, send_plan
_ids = itertools.count(1)
_engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()


class Engine(Halves):
    """One rank's engine. Ops name it by `id`, an integer that a traced graph can hold."""

    _segments: Segments
    pushes: ClassVar[bool]  # routing writes lists and rows of small batches into the receiver's segment
    vector_bytes: ClassVar[int] = 1  # alignment that inputs need

    def __init__(self, spec: BufferSpec, rank: int, device: torch.device, timeout_s: float) -> None:
        self.spec, self.rank, self.device, self.timeout_s = spec, rank, device, timeout_s
        self.num_local_experts = spec.placement.num_local(rank)
        self._capacities = {spec.num_max_tokens_per_rank: spec.capacity(rank)}  # rows of recv_x, by max_tokens
        self.shape = spec.gpu_shape() if self.pushes else spec.shape()  # sizes of the segments
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

    @property
    def capacity(self) -> int:
        """Rows of recv_x on this rank, in a dispatch without its own max_tokens."""
        return self._capacities[self.spec.num_max_tokens_per_rank]

    def capacity_for(self, max_tokens: int | None) -> int:
        """Rows of recv_x in a dispatch whose ranks send at most max_tokens tokens each."""
        if max_tokens is None:
            return self.capacity
        if max_tokens not in self._capacities:
            self._capacities[max_tokens] = self.spec.capacity(self.rank, max_tokens)
        return self._capacities[max_tokens]

    def weights_shape(self, capacity: int) -> tuple[int, ...]:
        """Shape of recv_weights: one weight per row or, with rows of tokens, K weights per row."""
        return (capacity, self.spec.num_topk) if self.by_token else (capacity,)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int, max_tokens: int | None = None,
        *, scaled: bool = False, scales: Tensor | None = None, expert_rows: int = 0, start: Start | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """x [T, H], topk_idx [T, K], topk_weights [T, K] -> recv_x, recv_weights, offs, recv_plan, send_plan.

        If `scaled`, recv_x holds codes and recv_scales is returned last. x then holds codes if `scales` is given, and
        otherwise rows that travel as codes. With expert_rows = R * max_tokens, each expert has as many rows, of which
        the last ones are unused, and offs has the number of used ones.
        """
        if type(tag) is not int or not 0 <= tag < NUM_TAGS:
            self._refuse_input(Op.DISPATCH, 0, checks.tag_problem(tag))
        most = self.spec.num_max_tokens_per_rank
        if max_tokens is not None:
            if type(max_tokens) is not int or not 1 <= max_tokens <= most:
                self._refuse_input(Op.DISPATCH, tag, checks.bound_problem(max_tokens, most))
            most = max_tokens
        row = self._check_scaled(tag, x, scales) if scaled else None
        num_tokens = self._reader.dispatch(x, topk_idx, topk_weights) if row is None else -1
        if not 0 <= num_tokens <= most:
            limit = "num_max_tokens_per_rank" if max_tokens is None else "max_tokens"
            x, topk_idx, topk_weights, scales = self._check_dispatch(
                tag, x, topk_idx, topk_weights, scaled, scales, limit, most
            )
            num_tokens = x.shape[0]
        try:
            return self._dispatch(x, topk_idx, topk_weights, num_tokens, tag, most, row, scales, expert_rows, start)
        except CapacityOverflow as error:  # every rank sees the same overflow and the same need, so all retry, once
            if not self._grow(most):
                self._advise(error, topk_idx)
                raise
        x = x.contiguous()  # a token window is now an earlier op's, and its rows may be padded
        return self._dispatch(x, topk_idx, topk_weights, num_tokens, tag, most, row, scales, expert_rows)

    def dispatch_scaled(
        self, x: Tensor, scales: Tensor | None, *others: Any, start: Start | None = None
    ) -> tuple[Tensor, ...]:
        """Run a dispatch with `scaled`; `others` are its arguments from topk_idx to max_tokens."""
        return self.dispatch(x, *others, scaled=True, scales=scales, start=start)

    def _check_dispatch(
        self, tag: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, scaled: bool, scales: Tensor | None,
        limit: str, most: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Refuse wrong inputs; return right ones as C++ reads them."""
        s, num_tokens = self.spec, checks.length(x)
        if scales is None:
            self._check(Op.DISPATCH, tag, "x", x, (num_tokens, s.hidden), s.dtype, may_be_window=True)
        if num_tokens > most:
            message = f"x: got {num_tokens} tokens, expected at most {limit} = {most}"
            error = TooManyTokens(message, rank=self.rank, op=Op.DISPATCH)
            self._refuse(Op.DISPATCH, tag, error, num_tokens, most)
        idx_dtype = torch.int32 if topk_idx.dtype is torch.int32 else torch.int64
        self._check(Op.DISPATCH, tag, "topk_idx", topk_idx, (num_tokens, s.num_topk), idx_dtype)
        self._check(Op.DISPATCH, tag, "topk_weights", topk_weights, (num_tokens, s.num_topk), self._acc_dtype)
        if self._windows is not None and self._windows.hold(x):
            if problem := self._windows.problem(x, self._next_window(), scaled):
                self._refuse_input(Op.DISPATCH, tag, problem)
        else:
            x = self._input(x)
        return x, self._input(topk_idx), self._input(topk_weights), None if scales is None else self._input(scales)

    def _dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens: int, tag: int, max_tokens: int,
        row: RowFormat | None, scales: Tensor | None, expert_rows: int, start: Start | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        capacity = self._capacities.get(max_tokens) or self.capacity_for(max_tokens)
        if expert_rows:
            capacity = self.num_local_experts * expert_rows
        recv_x = self._rows(capacity, x) if row is None else self._matrix(capacity, row.num_codes, row.codes)
        recv_weights = topk_weights.new_empty(self.weights_shape(capacity) if self.by_token else capacity)
        if is_anomaly_enabled():  # one test for both takes half as long
            blank(recv_x), blank(recv_weights)
        offs = topk_idx.new_empty(self.num_parts, dtype=torch.int32)
        recv_plan = offs.new_empty(self.plan_ints)  # naming the dtype again would take longer
        send_plan = offs.new_empty(num_tokens, self.spec.num_topk)
        args = _engine.DispatchArgs(
            x=x.data_ptr(),
            topk_idx=topk_idx.data_ptr(),
            idx_bytes=topk_idx.itemsize,
            topk_weights=topk_weights.data_ptr(),
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            capacity=capacity,
            recv_x=recv_x.data_ptr(),
            recv_weights=recv_weights.data_ptr(),
            offs=offs.data_ptr(),
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
        )
        if expert_rows:
            args.expert_rows = expert_rows
        if row is None:
            self._run(Op.DISPATCH, args, tag) if start is None else start(args, tag, x, topk_idx, topk_weights)
            return recv_x, recv_weights, offs, recv_plan, send_plan
        recv_scales = blank(self._matrix(capacity, row.num_scales, row.scales))
        args.scaled = _engine.ScaledArgs(
            row_format=0 if scales is None else row.word(self.spec.hidden),
            scales=0 if scales is None else scales.data_ptr(),
            recv_scales=recv_scales.data_ptr(),
            code_bytes=row.code_bytes,
            scale_bytes=row.scale_bytes,
        )
        self._run(Op.DISPATCH, args, tag) if start is None else start(args, tag, x, topk_idx, topk_weights, scales)
        return recv_x, recv_weights, offs, recv_plan, send_plan, recv_scales

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, recv_plan: Tensor, send_plan: Tensor, tag: int,
        out: Tensor | None = None, *, topk_weights: Tensor | None = None, start: Start | None = None,
    ) -> Tensor:  # fmt: skip
        """y [N, H], recv_weights [capacity] or None -> out [T, H]; N may be less than capacity.

        topk_weights [T, K] take the place of recv_weights, with sums="invariant"; y may then be [L, N / L, H].
        """
        plans = recv_plan, send_plan
        if topk_weights is None and (recv_weights is None) is not self.by_token:
            self._check_plans(Op.COMBINE, tag, *plans)
            self._refuse_input(Op.COMBINE, tag, checks.weights_problem(self.by_token))
        given, sizes = self._returned(Op.COMBINE, tag, ("y", "recv_weights"), (y, recv_weights, *plans))
        y, recv_weights, recv_plan, send_plan = given
        num_rows, capacity, num_tokens = sizes
        if out is None:
            written = self._rows(num_tokens, y)
        else:
            self._check(Op.COMBINE, tag, "out", out, (num_tokens, self.spec.hidden), self.spec.dtype)
            if problem := checks.out_problem(out, recv_plan, send_plan):
                self._refuse_input(Op.COMBINE, tag, problem)
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
        if topk_weights is not None:
            topk_weights = self._input(topk_weights)
            args.topk_weights = topk_weights.data_ptr()
        self._run(Op.COMBINE, args, tag) if start is None else start(args, tag, *given, topk_weights)
        if out is None:
            return written
        if written is not out:
            return out.copy_(written)
        if not out.is_inference():  # inference tensors count no versions
            increment_version(out)
        return out

    def dispatch_backward(
        self, grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, tag: int,
        *, start: Start | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        self._run(op, args, tag) if start is None else start(args, tag, *given)
        return grad_x, grad_topk_weights

    def _returned(self, op: Op, tag: int, names: tuple[str, str], given: _Given) -> tuple[_Given, tuple[int, int, int]]:
        """Check the inputs of a combine-type op. Return them as C++ reads them, and their rows, weights and tokens."""
        sizes = self._reader.combine(*given) if type(tag) is int and 0 <= tag < NUM_TAGS else None
        if sizes is not None:
            return given, sizes
        rows, weights, recv_plan, send_plan = given
        if weights is None and not self.by_token:
            rows = rows.flatten(0, -2)
        self._check_plans(op, tag, recv_plan, send_plan)
        num_rows, capacity = self._check_rows(op, tag, names[0], rows, names[1], weights)
        if weights is not None:
            weights = self._input(weights)
        given = self._input(rows), weights, recv_plan.contiguous(), send_plan.contiguous()
        return given, (num_rows, capacity, send_plan.shape[0])

    def combine_backward(
        self, grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, tag: int,
        *, start: Start | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """grad_out [T, H], y [N, H], recv_weights [capacity] -> grad_y [N, H], grad_recv_weights [capacity]."""
        op, plain = Op.COMBINE_BACKWARD, type(tag) is int and 0 <= tag < NUM_TAGS
        if not (plain and self._reader.combine_backward(grad_out, y, recv_weights, recv_plan)):
            grad_out, recv_plan = self._grad_out(tag, grad_out, recv_plan)
            if self.by_token:
                self._refuse_input(op, tag, checks.weights_problem(self.by_token))
            self._check_rows(op, tag, "y", y, "recv_weights", recv_weights)
            y, recv_weights = self._input(y), self._input(recv_weights)
        num_rows, capacity = y.shape[0], recv_weights.shape[0]
        grad_y = blank(self._rows(num_rows, y))
        grad_recv_weights = blank(torch.empty_like(recv_weights))
        self._run_combine_backward(
            tag, grad_out, recv_plan, grad_y, capacity, y, recv_weights, grad_recv_weights, start
        )
        return grad_y, grad_recv_weights

    def combine_tokens_backward(
        self, grad_out: Tensor, recv_plan: Tensor, num_rows: int, tag: int, *, start: Start | None = None
    ) -> Tensor:
        """grad_out [T, H] -> grad_y [num_rows, H] for rows of tokens: each is its token's row of grad_out."""
        grad_out, recv_plan = self._grad_out(tag, grad_out, recv_plan)
        if not self.by_token:
            self._refuse_input(Op.COMBINE_BACKWARD, tag, checks.weights_problem(self.by_token))
        grad_y = blank(self._rows(num_rows, grad_out))
        none = None, None, None
        self._run_combine_backward(tag, grad_out, recv_plan, grad_y, _engine.ANY_CAPACITY, *none, start)
        return grad_y

    def _grad_out(self, tag: int, grad_out: Tensor, recv_plan: Tensor) -> tuple[Tensor, Tensor]:
        """Check the gradient and the plan of a combine backward, and return them as C++ reads them."""
        op, s = Op.COMBINE_BACKWARD, self.spec
        self._check_plans(op, tag, recv_plan, None)
        self._check(op, tag, "grad_out", grad_out, (checks.length(grad_out), s.hidden), s.dtype)
        return self._input(grad_out), recv_plan.contiguous()

    def _run_combine_backward(
        self, tag: int, grad_out: Tensor, recv_plan: Tensor, grad_y: Tensor, capacity: int,
        y: Tensor | None, recv_weights: Tensor | None, grad_recv_weights: Tensor | None, start: Start | None,
    ) -> None:  # fmt: skip
        """Run combine's backward. `y`, `recv_weights` and `grad_recv_weights` are None with rows of tokens."""
        args = _engine.CombineBackwardArgs(
            grad_out=grad_out.data_ptr(),
            num_tokens=grad_out.shape[0],
            y=0 if y is None else y.data_ptr(),
            recv_weights=0 if recv_weights is None else recv_weights.data_ptr(),
            num_rows=grad_y.shape[0],
            capacity=capacity,
            recv_plan=recv_plan.data_ptr(),
            grad_y=grad_y.data_ptr(),
            grad_recv_weights=0 if grad_recv_weights is None else grad_recv_weights.data_ptr(),
        )
        if start is None:
            return self._run(Op.COMBINE_BACKWARD, args, tag)
        start(args, tag, grad_out, y, recv_weights, recv_plan)

    def token_window(self, num_tokens: int, compiled: bool = False) -> Tensor:
        """Return [num_tokens, H] for the next op, or ordinary memory if `compiled`; see moe_rt.Buffer.token_window."""
        self.health()
        self._require_place()
        window = require_window(self.spec, self.rank, num_tokens, self._next_window())
        if compiled:
            return self._matrix(num_tokens, self.spec.hidden, self.spec.dtype)
        if self._windows is None:
            segments, begin = self._segments, self._segments.addresses[self.rank]
            self._windows = TokenWindows(self.spec, self.shape, begin, self.device, list(segments.mappings))
            self._reader.avoid(begin=begin, end=begin + self.shape.segment_bytes())
        return self._windows.hand_out(window, num_tokens)

    def _check_scaled(self, tag: int, x: Tensor, scales: Tensor | None) -> RowFormat:
        """Check a dispatch of codes. Return the row format of x and scales or, without scales, of the codec."""
        s, op = self.spec, Op.DISPATCH
        if scales is None:
            if s.dispatch_dtype is None:
                message = "coded: got True without scales, expected a buffer with a dispatch_dtype, or (codes, scales)"
                self._refuse_input(op, tag, message)
            return RowFormat.of_codec(s.dispatch_dtype, s.hidden)
        shape, codes = checks.codes_expected(x, s.hidden)
        self._check(op, tag, "x[0], codes", x, shape, codes, may_be_window=True)
        self._check(op, tag, "x[1], scales", scales, *checks.scales_expected(scales, shape[0]))
        row, room = RowFormat.of(x, scales), s.shape().row_bytes()
        if row.row_bytes > room:
            message = f"x: got rows of {row.row_bytes} bytes with their scales, expected at most {room}"
            self._refuse_input(op, tag, message, row.row_bytes, room)
        return row

    def _check_rows(
        self, op: Op, tag: int, name: str, rows: Tensor, weights_name: str, weights: Tensor | None
    ) -> tuple[int, int]:
        """Check rows and weights, and return the count of each. The engine compares the counts with the plan."""
        num_rows = checks.length(rows)
        self._check(op, tag, name, rows, (num_rows, self.spec.hidden), self.spec.dtype)
        if weights is None:
            return num_rows, _engine.ANY_CAPACITY
        capacity = checks.length(weights)
        self._check(op, tag, weights_name, weights, self.weights_shape(capacity), self._acc_dtype)
        if num_rows > capacity:
            message = f"{name}: got {num_rows} rows, expected at most those of {weights_name}, {capacity}"
            self._refuse_input(op, tag, message, num_rows, capacity)
        return num_rows, capacity

    def _check_plans(self, op: Op, tag: int, recv_plan: Tensor, send_plan: Tensor | None) -> None:
        if type(tag) is not int or not 0 <= tag < NUM_TAGS:
            self._refuse_input(op, 0, checks.tag_problem(tag))
        self._check(op, tag, "handle.recv_plan", recv_plan, (self.plan_ints,), torch.int32)
        if send_plan is not None:
            shape = (checks.length(send_plan), self.spec.num_topk)
            self._check(op, tag, "handle.send_plan", send_plan, shape, torch.int32)

    def _check(
        self, op: Op, tag: int, name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype,
        may_be_window: bool = False,
    ) -> None:  # fmt: skip
        """Refuse an operand of the wrong type, shape, dtype or device, or in memory that ops write."""
        found = checks.mismatch(t, shape, dtype, self.device)
        if found is not None:
            got, size = found
            message = f"{name}: got {got}, expected {dtype} {list(shape)} on {self.device}"
            self._refuse_input(op, tag, message, size, shape[-1])
        if self._windows is not None and self._windows.touch(t) and not may_be_window:
            self._refuse_input(op, tag, checks.memory_problem(name, "a token window"))

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

    def _refuse_input(self, op: Op, tag: int, message: str, got: int = 0, expected: int = 0) -> NoReturn:
        self._refuse(op, tag, InvalidInput(message, rank=self.rank, op=op), got, expected)

    @abstractmethod
    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        """Announce that this rank refuses the op because of its input, then raise `error`."""

    @abstractmethod
    def _next_window(self) -> int | None:
        """Return the token window that the next op takes if it is a dispatch; None if the host does not know."""

    @abstractmethod
    def _rows(self, num_rows: int, like: Tensor) -> Tensor:
        """Return an uninitialised output [num_rows, H] of the payload's dtype, which is that of `like`."""

    @abstractmethod
    def _matrix(self, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised output for codes or scales."""

    @abstractmethod
    def _run(self, op: Op, args: Args, tag: int) -> None:
        """Run an op."""

    def _input(self, t: Tensor) -> Tensor:
        """Return the same values as C++ reads them."""
        return checks.as_stored(t)

    def _writable(self, out: Tensor) -> Tensor:
        """Return the tensor that C++ writes: `out`, or a fresh one that is then copied into it."""
        return out


def engine_by_id(engine_id: int) -> Engine:
    """Return the engine that an op was recorded with. Raise GroupClosed if its buffer no longer exists."""
    engine = _engines.get(engine_id)
    if engine is None:
        raise GroupClosed(f"buffer {engine_id}: got an op on a buffer that no longer exists, expected an open one")
    return engine
