"""The CPU engine: outputs from recycled memory, ops in the calling thread, statuses turned into exceptions.

The engine announces that it refuses an input, so that every rank raises in the same op and none waits for rows that
never arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.config.codec import Codec
from moe_rt.config.spec import ELEMENTS, BufferSpec
from moe_rt.diagnostics.collect import report_on
from moe_rt.diagnostics.elsewhere import elsewhere
from moe_rt.diagnostics.report import Report, cut, keep, last_words, readable
from moe_rt.engine.engine import Engine
from moe_rt.engine.halves import Args, Begun
from moe_rt.engine.statuses import error_from_status, refusal_code
from moe_rt.engine.storage import Recycler
from moe_rt.errors import Code, FaultInjected, GroupClosed, MoeRtError, Op
from moe_rt.faults import Point, reach
from moe_rt.group.processes import num_cores
from moe_rt.memory.segments import Segments


class CpuEngine(Engine):
    """A rank that is a process over shared memory, or a thread.

    Raises:
        OSError: the system grants no more threads.
        ValueError: this machine or build has no `isa`.
    """

    pushes = False

    def __init__(
        self,
        spec: BufferSpec,
        rank: int,
        segments: Segments,
        *,
        timeout_s: float,
        num_threads: int,
        isa: str,
        fault: _engine.Fault,
    ) -> None:
        super().__init__(spec, rank, torch.device("cpu"), timeout_s)
        self._segments = segments
        self._memory = Recycler(spec.tuning.recycled_bytes)
        self._report: Report | None = None  # made when the group failed
        _engine.write_segment_header(
            segment=segments.addresses[rank],
            shape=spec.shape(),
            rank=rank,
            config_hash=spec.hash(),
            members=segments.members,
            nodes=list(spec.topology.nodes),
        )
        addresses, network = segments.addresses, segments.network
        if spec.node_of and network is None:  # nodes that are all on this host
            network = _engine.MappedNetwork(segments=addresses, shape=spec.shape(), rank=rank)
            here = spec.topology.node_of(rank)
            addresses = [a if node == here else 0 for a, node in zip(addresses, spec.node_of, strict=True)]
        self._engine = _engine.Engine(
            shape=spec.shape(),
            elem=ELEMENTS[spec.dtype],
            rank=rank,
            config_hash=spec.hash(),
            expert_rank=list(spec.placement.ranks),
            node_of=spec.node_of,
            segments=addresses,
            watches=[-1 if w is None else w.descriptor for w in segments.watches],
            timeout_s=timeout_s,
            dispatch_codec=Codec.of(spec.dispatch_dtype),
            combine_codec=Codec.of(spec.combine_dtype),
            drop_overflow=spec.overflow == "drop",
            num_lanes=num_threads,
            isa=isa,
            fault=fault,
            cache_bytes=cache_bytes(),
            near_ns=spec.tuning.near_ns,
            stream_shares=spec.tuning.stream_shares,
            num_cores=num_cores([pid for pid, _ in segments.members if pid]),
            network=network,
        )
        self._fault = fault
        self._ops: dict[Op, Callable[..., _engine.Status | None]] = {
            Op.DISPATCH: self._engine.dispatch,
            Op.COMBINE: self._engine.combine,
            Op.DISPATCH_BACKWARD: self._engine.combine,
            Op.COMBINE_BACKWARD: self._engine.combine_backward,
        }

    def _rows(self, num_rows: int, like: Tensor) -> Tensor:
        return self._memory.empty_like(like, num_rows, self.spec.hidden)

    def _matrix(self, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._memory.empty(num_rows, columns, dtype)

    def _next_window(self) -> int:
        return self._engine.next_token_window()

    def _run(self, op: Op, args: Args, tag: int) -> None:
        if self._begun:
            self._end_before(op, tag)
        if self._windows is not None:
            self._windows.retire()
        failed = self._ops[op](args, tag)
        if failed is not None:
            raise self._error(failed)

    def _run_first(self, begun: Begun) -> None:
        if self._windows is not None:
            self._windows.retire()
        failed = self._engine.begin(begun.args, begun.tag)
        if failed is None:
            return
        error = self._error(failed)
        if failed.code == Code.INVALID_INPUT:  # not announced yet
            self._refuse(begun.op, begun.tag, error, failed.got, failed.expected)
        raise error

    def _run_second(self, begun: Begun) -> None:
        failed = self._engine.finish(begun.args, begun.tag)
        if failed is not None:
            raise self._error(failed)

    def _grow(self, max_tokens: int) -> bool:
        if self.spec.overflow != "retry":
            return False
        self._capacities[max_tokens] = max(self.capacity_for(max_tokens), self._engine.needed_rows())
        return True

    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        """Announce the refusal, then raise `error`. If the group has failed, raise that, caused by `error`."""
        self._end_ops(self._begun)
        code = refusal_code(error)
        status = self._engine.refuse(op=op, code=code, got=got, expected=expected, tag=tag)
        if status.code >= Code.CONFIG_MISMATCH:
            raise self._error(status) from error
        raise error

    def health(self) -> None:
        status = self._engine.health()
        if status.code:
            raise self._error(status)

    def timings(self) -> dict[str, Any]:
        last = self._engine.op_record()
        arrived_ns = last.arrived_ns or last.end_ns  # a wait that failed ends with the op
        return {
            "op": Op(last.op).name.lower(),
            "before_ns": last.announced_ns - last.start_ns,
            "wait_ns": arrived_ns - last.announced_ns,
            "after_ns": last.end_ns - arrived_ns,
            "arrival_ns": self._engine.arrival_ns(),
            "line_latency_ns": self._engine.line_latency_ns(),
        }

    def report(self) -> Report:
        watches, mappings = list(self._segments.watches), list(self._segments.mappings)
        if not mappings:
            raise GroupClosed("the buffer was closed on this rank; expected an open one", rank=self.rank)
        return report_on(self._segments.members, mappings, watches)

    def waited_ns(self) -> list[int]:
        return self._engine.waited_ns()

    def poison(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._engine.leave_words(last_words(error))
        self._engine.poison(code=Code.POISONED, peer=-1)

    def close(self, why: str = "") -> None:
        """Close the engine, silently in a forked child; see Engine.close.

        If another thread is inside an op, the segments stay mapped until the op lets go of the engine.
        """
        try:
            self.reach(Point.IN_DESTROY)
        finally:
            if why and self._segments.mappings:
                self._engine.leave_words(cut(why))
            if self._engine.close():
                self._segments.release()

    def reach(self, point: Point) -> None:
        """Inject the fault configured for a point outside of ops. Poison the group if that raises FaultInjected."""
        try:
            reach(self._fault, point)
        except FaultInjected as error:
            self.poison(error)
            raise

    def _error(self, status: _engine.Status) -> MoeRtError:
        """Return the exception for a failed status, with a report on the other ranks if this one waited."""
        code, report = status.got if status.code == Code.POISONED else status.code, None
        if code in (Code.PEER_TIMEOUT, Code.PEER_DEAD, Code.CALL_ORDER_MISMATCH):
            report = self._report = self._report or keep(self.report(), self.rank)
        found = ""
        if status.code == Code.PEER_DEAD:
            found = self._lost_link(status.peer)
        elif code in (Code.POISONED, Code.PEER_CLOSED):
            found = self._last_words_of(status.peer)
        elif code == Code.CALL_ORDER_MISMATCH and report and report.disagreement:
            found = report.disagreement.calls
        elif code == Code.PEER_TIMEOUT and report:
            found = self._elsewhere(status.expected if status.code == Code.POISONED else status.peer, report)
        return error_from_status(status, self.rank, self.timeout_s, report, found)

    def _last_words_of(self, peer: int) -> str:
        mappings = list(self._segments.mappings)
        if not 0 <= peer < len(mappings):  # a poison word may name any number
            return ""
        if mappings[peer] is None:
            return readable(self._engine.remote_last_words(peer))
        with suppress(ValueError):  # overwritten meanwhile
            return readable(_engine.read_segment(mappings[peer]).last_words)
        return ""

    def _lost_link(self, peer: int) -> str:
        network = self._segments.network
        problem = network.problem(peer) if network is not None else ""
        return f"the process of rank {peer} ended, or the link to it is down ({problem})" if problem else ""

    def _elsewhere(self, late: int, report: Report) -> str:
        own = report.ranks[self.rank].last_ops
        if not own or not 0 <= late < self.spec.num_ranks or late == self.rank:
            return ""
        return elsewhere(self._segments, self.rank, late, own[-1].start_ns)


def cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of a core's last-level cache; 32 MiB if the kernel does not report it.

    glibc's sysconf may add up all caches of a processor.
    """
    with suppress(OSError, ValueError, KeyError):
        last = max(caches.glob("index*"), key=lambda index: int((index / "level").read_text()))
        size = (last / "size").read_text().strip()
        return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
    return 32 << 20
