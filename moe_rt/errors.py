"""The errors of moe_rt: one family, each saying what was got, what was expected and which rank is concerned.

Refusals (bad input, overflow) are raised by every rank in the same op, and the buffer can be used again. Failures (a
dead or silent peer, ranks that disagree) end the group: every later op raises `GroupPoisoned` or the same failure.
A message ends with the command that shows the section of docs/errors.md which says what to do.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_rt.diagnostics.report import Report


class Code(IntEnum):
    """Status codes of cuda/protocol/core/status.h."""

    OK = 0
    INVALID_INPUT = 1
    INVALID_ROUTING = 2
    TOO_MANY_TOKENS = 3
    CAPACITY_OVERFLOW = 4
    CONFIG_MISMATCH = 16
    CALL_ORDER_MISMATCH = 17
    CORRUPT_PEER = 18
    PEER_TIMEOUT = 19
    PEER_DEAD = 20
    PEER_CLOSED = 21
    POISONED = 22
    FAULT_INJECTED = 23
    INTERRUPTED = 24
    BOUND_MISMATCH = 25
    ROW_FORMAT_MISMATCH = 26
    CLOSED = 32
    CONCURRENT_USE = 33
    FORKED = 34


class Op(IntEnum):
    """The four ops, as they travel in headers."""

    NONE = 0
    DISPATCH = 1
    COMBINE = 2
    DISPATCH_BACKWARD = 3
    COMBINE_BACKWARD = 4


class Phase(IntEnum):
    """Where in an op something was noticed."""

    NONE = 0
    PUBLISH = 1
    WAIT = 2
    GATHER = 3
    PUSH = 4
    REDUCE = 5


class MoeRtError(RuntimeError):
    """Base of all errors. `rank` is who raises, `peer` whom it concerns; -1 where that has no meaning.

    `report` says what every rank did when a wait was in vain or ranks called different ops; None in other errors and on
    CUDA ranks.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        peer: int = -1,
        op: Op = Op.NONE,
        seq: int = 0,
        phase: Phase = Phase.NONE,
        report: Report | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.peer, self.op, self.seq, self.phase, self.report = rank, peer, op, seq, phase, report

    def __str__(self) -> str:
        text, named = super().__str__(), next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        section = f"(moe-rt docs errors#{named.__name__.lower()})"
        return text if text.endswith(section) else f"{text} {section}"  # a peer's may be part of the message


class InvalidConfig(MoeRtError, ValueError):
    """A buffer or layer was asked for with a value that makes no sense, on this rank or on a peer."""


class CompileError(MoeRtError):
    """CUDA kernels could not be compiled: no compiler, or it refused; the message holds its log."""


class LaunchFailed(MoeRtError):
    """The CUDA driver refused to load or launch a kernel."""


class InvalidInput(MoeRtError, ValueError):
    """A tensor has the wrong shape, dtype, device or kind, a tag is none, or a handle is not of this buffer."""


class InvalidRouting(InvalidInput):
    """An expert id lies outside [-1, num_experts)."""


class TooManyTokens(InvalidInput):
    """More tokens than num_max_tokens_per_rank."""


class CapacityOverflow(MoeRtError):
    """A rank would receive more rows than its capacity; no row was delivered anywhere."""


class ConfigMismatch(MoeRtError):
    """Ranks disagree about a buffer's configuration."""


class CallOrderMismatch(MoeRtError):
    """Ranks issued different ops, or the same op on different layers or handles.

    `peer` is the one rank that called something else than most; -1 where nobody can say who is right.
    """


class CorruptPeer(MoeRtError):
    """A peer's control data cannot be true; nothing was read through it."""


class PeerTimeout(MoeRtError):
    """A peer did not announce the op, or come to make a buffer, in time."""


class PeerDead(MoeRtError):
    """A peer's process ended before it announced the op, or came to make a buffer."""


class GroupPoisoned(MoeRtError):
    """Another rank failed first and said so; `peer` is that rank."""


class FaultInjected(MoeRtError):
    """MOE_RT_FAULT asked this rank to fail here."""


class GroupClosed(MoeRtError):
    """The buffer, or a peer's, was closed."""


class RankExcluded(MoeRtError):
    """The ranks that are left have gone on without this one."""


class StoreLost(MoeRtError):
    """The store through which ranks meet has ended, perhaps with the rank that served it."""


class ConcurrentUse(MoeRtError):
    """A second thread entered an op while one was running on the same buffer."""


class OutOfSharedMemory(MoeRtError, MemoryError):
    """A segment could not be reserved in full."""


class SegmentPermission(MoeRtError, PermissionError):
    """A peer's segment cannot be opened, or is not what the peer said it is."""


class LimitReached(MoeRtError):
    """The system grants this process no more descriptors or threads."""


class MissingPackage(MoeRtError, ImportError):
    """A package that this use needs is not installed; the message says how to install it."""


class CorruptCheckpoint(MoeRtError):
    """A checkpoint's files are not as they were written, and no older whole one is there."""


class WriteFailed(MoeRtError, OSError):
    """The system refused to write a checkpoint on some rank: the disk is full, say."""


class SizeOverflow(InvalidConfig):
    """A size does not fit the types of the protocol."""
