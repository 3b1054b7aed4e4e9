"""Converts a status of an engine or a kernel to an exception with a readable message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_rt.config.codec import spelled
from moe_rt.errors import (
    CallOrderMismatch,
    CapacityOverflow,
    Code,
    ConcurrentUse,
    ConfigMismatch,
    CorruptPeer,
    FaultInjected,
    GroupClosed,
    GroupPoisoned,
    InvalidInput,
    InvalidRouting,
    MoeRtError,
    Op,
    PeerDead,
    PeerTimeout,
    Phase,
    TooManyTokens,
)

if TYPE_CHECKING:
    from moe_rt._engine import Status
    from moe_rt.diagnostics.report import Report

CLASSES: dict[Code, type[MoeRtError]] = {
    Code.INVALID_INPUT: InvalidInput,
    Code.INVALID_ROUTING: InvalidRouting,
    Code.TOO_MANY_TOKENS: TooManyTokens,
    Code.CAPACITY_OVERFLOW: CapacityOverflow,
    Code.CONFIG_MISMATCH: ConfigMismatch,
    Code.CALL_ORDER_MISMATCH: CallOrderMismatch,
    Code.CORRUPT_PEER: CorruptPeer,
    Code.PEER_TIMEOUT: PeerTimeout,
    Code.PEER_DEAD: PeerDead,
    Code.PEER_CLOSED: GroupClosed,
    Code.POISONED: GroupPoisoned,
    Code.FAULT_INJECTED: FaultInjected,
    Code.INTERRUPTED: GroupPoisoned,
    Code.BOUND_MISMATCH: ConfigMismatch,
    Code.ROW_FORMAT_MISMATCH: ConfigMismatch,
    Code.CLOSED: GroupClosed,
    Code.CONCURRENT_USE: ConcurrentUse,
    Code.FORKED: GroupClosed,
}


_SAME_ORDER = "all ranks must issue the same ops in the same order"
_NO_TOKENS = "a rank without tokens must call, too, with T = 0"


def _call_name(word: int) -> str:
    """Describe a call word (signal.h). A peer's word may name no op."""
    word &= (1 << 64) - 1
    op = word >> 60
    name = Op(op).name.lower() if op in Op._value2member_map_ else f"op {op}"
    handle = f" (handle of dispatch #{word & 0xFFFFFFFF})" if word & 0xFFFFFFFF and op != Op.DISPATCH else ""
    return f"{name} of layer tag {word >> 32 & 0xFFFFFFF}{handle}"


def _first_cause(code: int, concerned: int, found: str) -> str:
    """Describe why a peer failed first, from its poison word and its last words."""
    if code == Code.POISONED:
        return found or "its own exception, or abort()"
    if code == Code.INTERRUPTED:
        return "a signal handler raised in its wait, as that of Ctrl-C does"
    known = CLASSES.get(Code(code)) if code in Code._value2member_map_ else None
    blamed = f", concerning rank {concerned}" if concerned >= 0 and code != Code.CALL_ORDER_MISMATCH else ""
    return (known.__name__ if known else f"code {code}") + blamed + (f"; {found}" if found else "")


def _explain(code: Code, status: Status, rank: int, timeout_s: float, found: str) -> str:
    peer, got, expected = f"rank {status.peer}", status.got, status.expected
    match code:
        case Code.INVALID_INPUT if status.peer == rank and got != expected:  # Python cannot see this count
            return f"y: got {got} rows, expected at least the {expected} that were received, handle.offs[-1]"
        case Code.INVALID_INPUT if status.peer == rank:
            return (
                "handle: got plans that no dispatch of this buffer with as many tokens, and as many recv_weights, has "
                "written (another buffer's, or overwritten), expected both as dispatch returned them"
            )
        case Code.INVALID_INPUT:
            sizes = f": got {got}, expected {expected}" if got != expected else ""
            return f"{peer} refused its input{sizes}; its own error names the argument"
        case Code.INVALID_ROUTING:
            return f"{peer} got expert id {got} in topk_idx, expected -1 or [0, {expected})"
        case Code.TOO_MANY_TOKENS:
            bounds = "num_max_tokens_per_rank or this call's max_tokens"
            return f"{peer} got {got} tokens, expected at most {expected}, {bounds}"
        case Code.CAPACITY_OVERFLOW:
            return (
                f"{peer} would receive {got} rows, expected at most its capacity of {expected}; "
                'raise capacity_factor, or choose overflow="drop"'
            )
        case Code.CONFIG_MISMATCH:
            return f"{peer} published configuration {got & (1 << 64) - 1:#x}, expected {expected & (1 << 64) - 1:#x}"
        case Code.BOUND_MISMATCH:
            return f"max_tokens: got {got} on {peer}, expected {expected} as on rank {rank}"
        case Code.ROW_FORMAT_MISMATCH:
            return f"x: got {spelled(got)} on {peer}, expected {spelled(expected)} as on rank {rank}"
        case Code.CALL_ORDER_MISMATCH if status.phase == Phase.WAIT and got >= 0 and (got >> 60) == 0:
            return f"{found or f'{peer} announced another op, expected this one'}; {_SAME_ORDER}"
        case Code.CALL_ORDER_MISMATCH:
            calls = f"{peer} called {_call_name(got)}; rank {rank} called {_call_name(expected)}"
            return f"{found or calls}; {_SAME_ORDER}"
        case Code.CORRUPT_PEER:
            return f"control data of {peer} cannot be true (got {got}, expected {expected})"
        case Code.PEER_TIMEOUT if status.phase != Phase.WAIT:
            return f"{peer} did not answer within {timeout_s:g} s while data of this op was under way; is it stopped?"
        case Code.PEER_TIMEOUT:
            return f"{peer} announced op {got}, expected {expected} within {timeout_s:g} s; {found or _NO_TOKENS}"
        case Code.PEER_DEAD:
            found = found or f"the process of {peer} ended"
            if status.phase != Phase.WAIT:
                return f"{found}: data of this op was still under way"
            return f"{found}: it announced op {got}, expected {expected}; {_NO_TOKENS}"
        case Code.PEER_CLOSED:
            why = f" ({found})" if found else ""
            return f"{peer} closed its buffer{why}: it announced op {got}, expected {expected}; {_NO_TOKENS}"
        case Code.POISONED:
            return f"{peer} failed first: {_first_cause(got, expected, found)}; the group is over"
        case Code.FAULT_INJECTED:
            return "failed as MOE_RT_FAULT asked"
        case Code.INTERRUPTED:  # the op itself raised the handler's exception; later ops raise this
            return "a signal handler raised in this op and ended the group; make a new buffer on every rank"
        case Code.CLOSED:
            return "the buffer was closed on this rank; expected an open one"
        case Code.FORKED:
            return "got a use after fork, expected the process that made the buffer"
        case _:
            return "another thread is inside an op of this buffer; expected one op at a time"


def error_from_status(
    status: Status, rank: int, timeout_s: float, report: Report | None = None, found: str = ""
) -> MoeRtError:
    """Build the exception for a status of the engine, which must not be OK.

    Args:
        report: report to append to the message.
        found: the last words of the rank that failed or left, the op that the late rank waits in instead, what ranks
            called, or how a peer on another host was lost; "" if unknown.
    """
    code, peer = Code(status.code), status.peer
    kind = CLASSES[code]
    if code is Code.POISONED and status.got == Code.PEER_DEAD:
        kind, peer = PeerDead, status.expected
    mismatches = (Code.BOUND_MISMATCH, Code.ROW_FORMAT_MISMATCH)
    if code is Code.POISONED and status.got in mismatches:  # every rank has a mismatch, not only the first to see it
        kind, peer = ConfigMismatch, status.expected
    if code is Code.CALL_ORDER_MISMATCH:  # two ranks disagree, and neither is known to be right
        outvoted = report.disagreement.outvoted if report and report.disagreement else []
        peer = outvoted[0] if len(outvoted) == 1 else -1
    op, phase = Op(status.op), Phase(status.phase)
    where = f"{op.name.lower()} #{status.seq} on rank {rank}: " if op else f"rank {rank}: "
    message = where + _explain(code, status, rank, timeout_s, found) + (f"\n{report}" if report else "")
    return kind(message, rank=rank, peer=peer, op=op, seq=status.seq, phase=phase, report=report)


def refusal_code(error: MoeRtError) -> Code:
    """Status code that peers receive if this rank refuses its input with `error`."""
    return Code.TOO_MANY_TOKENS if isinstance(error, TooManyTokens) else Code.INVALID_INPUT
