"""The errors of moe_rt. Each message states what was got, what was expected and which rank is concerned.

Refusals (bad input, overflow) are raised by every rank in the same op, and the buffer can be used again. Failures (a
dead or silent peer, ranks that disagree) end the group: every later op raises `GroupPoisoned` or the same failure.
A message ends with the command that shows its section of docs/errors.md, which explains what to do.
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
    """The four ops, by their numbers in headers."""

    NONE = 0
    DISPATCH = 1
    COMBINE = 2
    DISPATCH_BACKWARD = 3
    COMBINE_BACKWARD = 4


class Phase(IntEnum):
    """Part of an op in which an error was found."""

    NONE = 0
    PUBLISH = 1
    WAIT = 2
    GATHER = 3
    PUSH = 4
    REDUCE = 5


class MoeRtError(RuntimeError):
    """Base of all errors.

    Attributes:
        rank: the rank that raises, or -1 if that has no meaning.
        peer: the rank that the error concerns, or -1.
        op, seq, phase: the op in which it was found, the op's sequence number, and the part of the op.
        report: what every rank was doing when a wait failed or ranks called different ops; None in other errors and on
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
        return text if text.endswith(section) else f"{text} {section}"  # a quoted peer's has it already


class InvalidConfig(MoeRtError, ValueError):
    """A value given for a buffer or layer is invalid, on this rank or on a peer."""


class CompileError(MoeRtError):
    """CUDA kernels could not be compiled: the compiler is missing or failed. The message holds its log."""


class LaunchFailed(MoeRtError):
    """The CUDA driver refused to load or launch a kernel."""


class InvalidInput(MoeRtError, ValueError):
    """A tensor has the wrong shape, dtype, device or kind, a tag is invalid, or a handle is not of this buffer."""


class InvalidRouting(InvalidInput):
    """An expert id is outside [-1, num_experts)."""


class TooManyTokens(InvalidInput):
    """A rank gave more tokens than num_max_tokens_per_rank, or than the call's max_tokens."""


class CapacityOverflow(MoeRtError):
    """A rank would receive more rows than its capacity; no row was delivered anywhere."""


class ConfigMismatch(MoeRtError):
    """Ranks disagree about a buffer's configuration."""


class CallOrderMismatch(MoeRtError):
    """Ranks issued different ops, or the same op on different layers or handles.

    `peer` is the one rank that called something other than the majority; -1 if that is not decided.
    """


class CorruptPeer(MoeRtError):
    """A peer's control data is invalid; no memory was accessed through it."""


class PeerTimeout(MoeRtError):
    """A peer did not announce the op, or did not join the making of a buffer, in time."""


class PeerDead(MoeRtError):
    """A peer's process ended before it announced the op or joined the making of a buffer."""


class GroupPoisoned(MoeRtError):
    """Another rank failed first and poisoned the group; `peer` is that rank."""


class FaultInjected(MoeRtError):
    """MOE_RT_FAULT asked this rank to fail here."""


class GroupClosed(MoeRtError):
    """This rank or a peer closed the buffer."""


class RankExcluded(MoeRtError):
    """The surviving ranks continued without this rank."""


class StoreLost(MoeRtError):
    """The rendezvous store is gone, possibly with the rank that served it."""


class ConcurrentUse(MoeRtError):
    """A second thread entered an op while one was running on the same buffer."""


class OutOfSharedMemory(MoeRtError, MemoryError):
    """A segment could not be reserved in full."""


class SegmentPermission(MoeRtError, PermissionError):
    """A peer's segment cannot be opened, or differs from what the peer announced."""


class LimitReached(MoeRtError):
    """The operating system grants this process no more descriptors or threads."""


class MissingPackage(MoeRtError, ImportError):
    """A required package is not installed; the message says how to install it."""


class CorruptCheckpoint(MoeRtError):
    """A checkpoint's files are missing or damaged; if older checkpoints were tried, none is intact."""


class WriteFailed(MoeRtError, OSError):
    """A checkpoint could not be written on some rank, for example because the disk is full."""


class SizeOverflow(InvalidConfig):
    """A size does not fit the types of the protocol."""


def expect(condition: bool, field: str, got: object, expected: str) -> None:
    """Raise InvalidConfig, which names the field, what was got and what was expected, unless `condition` holds."""
    if not condition:
        raise InvalidConfig(f"{field}: got {got}, expected {expected}")
