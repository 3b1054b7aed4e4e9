"""Every status of an engine becomes an error of one class, in words that say what was got and what was expected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt import errors
from moe_rt.config.codec import Codec
from moe_rt.engine import statuses
from moe_rt.engine.statuses import error_from_status
from moe_rt.errors import Code, MoeRtError, Op, Phase, TooManyTokens

RANK, TIMEOUT_S = 1, 2.5
NO_TOKENS = "a rank without tokens must call, too, with T = 0"
ORDER = "all ranks must issue the same ops in the same order"


def status(code: int, peer: int = 2, got: int = 5, expected: int = 7, **changes: Any) -> Any:
    fields = dict(code=code, peer=peer, got=got, expected=expected, op=Op.COMBINE, seq=3, phase=Phase.WAIT)
    return SimpleNamespace(**{**{k: int(v) for k, v in fields.items()}, **changes})


def words(given: Any, found: str = "") -> str:
    message = str(error_from_status(given, RANK, TIMEOUT_S, found=found))
    assert message.startswith("combine #3 on rank 1: ")
    return message.removeprefix("combine #3 on rank 1: ").partition(" (moe-rt docs")[0]


def call(op: int, tag: int, handle: int) -> int:
    return op << 60 | tag << 32 | handle


REFUSED = "rank 2 refused its input"
DIFFERS = call(Op.COMBINE, 8, 4), call(Op.DISPATCH, 9, 4)


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        (status(Code.INVALID_INPUT), "", f"{REFUSED}: got 5, expected 7; its own error names the argument"),
        (status(Code.INVALID_INPUT, got=7), "", f"{REFUSED}; its own error names the argument"),
        (
            status(Code.INVALID_INPUT, peer=RANK),
            "",
            "y: got 5 rows, expected at least the 7 that were received, handle.offs[-1]",
        ),
        (
            status(Code.INVALID_INPUT, peer=RANK, got=7),
            "",
            "handle: got plans that no dispatch of this buffer with as many tokens, and as many recv_weights, has "
            "written (another buffer's, or overwritten), expected both as dispatch returned them",
        ),
        (status(Code.INVALID_ROUTING), "", "rank 2 got expert id 5 in topk_idx, expected -1 or [0, 7)"),
        (
            status(Code.TOO_MANY_TOKENS),
            "",
            "rank 2 got 5 tokens, expected at most 7, num_max_tokens_per_rank or this call's max_tokens",
        ),
        (
            status(Code.CAPACITY_OVERFLOW),
            "",
            "rank 2 would receive 5 rows, expected at most its capacity of 7; raise capacity_factor, or choose "
            'overflow="drop"',
        ),
        (
            status(Code.CONFIG_MISMATCH, got=-1, expected=255),
            "",
            "rank 2 published configuration 0xffffffffffffffff, expected 0xff",
        ),
        (status(Code.BOUND_MISMATCH), "", "max_tokens: got 5 on rank 2, expected 7 as on rank 1"),
        (
            status(Code.CALL_ORDER_MISMATCH),
            "",
            f"rank 2 announced another op, expected this one; {ORDER}",
        ),
        (status(Code.CALL_ORDER_MISMATCH), "rank 2 called it", f"rank 2 called it; {ORDER}"),
        (
            status(Code.CALL_ORDER_MISMATCH, got=DIFFERS[0], expected=DIFFERS[1]),
            "",
            "rank 2 called combine of layer tag 8 (handle of dispatch #4); rank 1 called dispatch of layer tag 9; "
            f"{ORDER}",
        ),
        (
            status(
                Code.CALL_ORDER_MISMATCH, got=call(15, 1, 0) - (1 << 64), expected=DIFFERS[1], phase=int(Phase.GATHER)
            ),
            "",
            f"rank 2 called op 15 of layer tag 1; rank 1 called dispatch of layer tag 9; {ORDER}",
        ),
        (
            status(Code.CALL_ORDER_MISMATCH, got=5, expected=DIFFERS[1], phase=int(Phase.GATHER)),
            "",
            "rank 2 called none of layer tag 0 (handle of dispatch #5); rank 1 called dispatch of layer tag 9; "
            f"{ORDER}",
        ),
        (status(Code.CORRUPT_PEER), "", "control data of rank 2 cannot be true (got 5, expected 7)"),
        (status(Code.PEER_TIMEOUT), "", f"rank 2 announced op 5, expected 7 within 2.5 s; {NO_TOKENS}"),
        (status(Code.PEER_TIMEOUT), "it is there", "rank 2 announced op 5, expected 7 within 2.5 s; it is there"),
        (
            status(Code.PEER_TIMEOUT, phase=int(Phase.GATHER)),
            "",
            "rank 2 did not answer within 2.5 s while data of this op was under way; is it stopped?",
        ),
        (
            status(Code.PEER_DEAD),
            "",
            f"the process of rank 2 ended: it announced op 5, expected 7; {NO_TOKENS}",
        ),
        (
            status(Code.PEER_DEAD, phase=int(Phase.GATHER)),
            "a link broke",
            "a link broke: data of this op was still under way",
        ),
        (status(Code.PEER_CLOSED), "", f"rank 2 closed its buffer: it announced op 5, expected 7; {NO_TOKENS}"),
        (
            status(Code.PEER_CLOSED),
            "OSError: x",
            f"rank 2 closed its buffer (OSError: x): it announced op 5, expected 7; {NO_TOKENS}",
        ),
        (
            status(Code.POISONED, got=Code.POISONED),
            "",
            "rank 2 failed first: its own exception, or abort(); the group is over",
        ),
        (
            status(Code.POISONED, got=Code.POISONED),
            "ValueError: x",
            "rank 2 failed first: ValueError: x; the group is over",
        ),
        (
            status(Code.POISONED, got=Code.INTERRUPTED),
            "x",
            "rank 2 failed first: a signal handler raised in its wait, as that of Ctrl-C does; the group is over",
        ),
        (
            status(Code.POISONED, got=Code.CORRUPT_PEER, expected=0),
            "",
            "rank 2 failed first: CorruptPeer, concerning rank 0; the group is over",
        ),
        (
            status(Code.POISONED, got=Code.CORRUPT_PEER, expected=-1),
            "x",
            "rank 2 failed first: CorruptPeer; x; the group is over",
        ),
        (
            status(Code.POISONED, got=Code.CALL_ORDER_MISMATCH, expected=0),
            "",
            "rank 2 failed first: CallOrderMismatch; the group is over",
        ),
        (status(Code.POISONED, got=99, expected=-1), "", "rank 2 failed first: code 99; the group is over"),
        (status(Code.FAULT_INJECTED), "", "failed as MOE_RT_FAULT asked"),
        (
            status(Code.INTERRUPTED),
            "",
            "a signal handler raised in this op and ended the group; make a new buffer on every rank",
        ),
        (status(Code.CLOSED), "", "the buffer was closed on this rank; expected an open one"),
        (status(Code.FORKED), "", "got a use after fork, expected the process that made the buffer"),
        (
            status(Code.CONCURRENT_USE),
            "",
            "another thread is inside an op of this buffer; expected one op at a time",
        ),
    ],
)
def test_words(given: Any, found: str, expected: str) -> None:
    assert words(given, found) == expected


def test_formats_of_rows_are_spelled() -> None:
    said = words(status(Code.ROW_FORMAT_MISMATCH, got=0, expected=int(Codec.FP8)))
    assert said.startswith("x: got ")
    assert said.endswith(" as on rank 1")
    got, expected = said.removeprefix("x: got ").split(" on rank 2, expected ")
    assert (got, expected.removesuffix(" as on rank 1")) == (statuses.spelled(0), statuses.spelled(int(Codec.FP8)))
    assert statuses.spelled(0) != statuses.spelled(int(Codec.FP8))


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_classes_and_fields(code: Code) -> None:
    error = error_from_status(status(code, got=int(Code.POISONED)), RANK, TIMEOUT_S)
    kinds = {
        "PEER_CLOSED": "GroupClosed", "POISONED": "GroupPoisoned", "INTERRUPTED": "GroupPoisoned",
        "BOUND_MISMATCH": "ConfigMismatch", "ROW_FORMAT_MISMATCH": "ConfigMismatch", "CLOSED": "GroupClosed",
        "FORKED": "GroupClosed",
    }  # fmt: skip
    name = kinds.get(code.name, code.name.title().replace("_", ""))
    assert type(error) is getattr(errors, name)
    assert (error.rank, error.op, error.seq, error.phase) == (RANK, Op.COMBINE, 3, Phase.WAIT)
    assert error.peer == (-1 if code is Code.CALL_ORDER_MISMATCH else 2)


@pytest.mark.parametrize(
    ("first", "kind", "peer"),
    [
        (Code.PEER_DEAD, errors.PeerDead, 0),
        (Code.BOUND_MISMATCH, errors.ConfigMismatch, 0),
        (Code.ROW_FORMAT_MISMATCH, errors.ConfigMismatch, 0),
        (Code.PEER_TIMEOUT, errors.GroupPoisoned, 2),
        (Code.CONFIG_MISMATCH, errors.GroupPoisoned, 2),
    ],
)
def test_a_first_cause_that_concerns_every_rank_is_raised_as_it_is(
    first: Code, kind: type[MoeRtError], peer: int
) -> None:
    error = error_from_status(status(Code.POISONED, got=int(first), expected=0), RANK, TIMEOUT_S)
    assert (type(error), error.peer) == (kind, peer)
    alone = error_from_status(status(Code.CORRUPT_PEER, got=int(first), expected=0), RANK, TIMEOUT_S)
    assert (type(alone), alone.peer) == (errors.CorruptPeer, 2), "a number that is no code"


@pytest.mark.parametrize(("outvoted", "peer"), [([], -1), ([0], 0), ([0, 2], -1)])
def test_only_a_rank_that_alone_is_outvoted_is_blamed(outvoted: list[int], peer: int) -> None:
    report: Any = SimpleNamespace(disagreement=SimpleNamespace(outvoted=outvoted))
    for code, expected in ((Code.CALL_ORDER_MISMATCH, peer), (Code.CORRUPT_PEER, 2)):
        error = error_from_status(status(code), RANK, TIMEOUT_S, report)
        assert (error.peer, error.report) == (expected, report)
        assert f"\n{report}" in str(error)


def test_outside_of_ops_no_op_is_named() -> None:
    error = error_from_status(status(Code.CLOSED, op=0), RANK, TIMEOUT_S)
    assert str(error).startswith("rank 1: the buffer was closed")


def test_codes_of_refusals() -> None:
    assert statuses.refusal_code(TooManyTokens("")) == Code.TOO_MANY_TOKENS
    assert statuses.refusal_code(errors.InvalidRouting("")) == Code.INVALID_INPUT
