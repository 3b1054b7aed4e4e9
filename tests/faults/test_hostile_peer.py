"""Arbitrary bytes in a peer's mailbox or the poison word raise a MoeRtError with a readable message."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routing import buffer_kwargs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import Code, MoeRtError

POISON, MAILBOXES, MAILBOX_BYTES, HEADER_BYTES = 128, 256, 128, 56  # cuda/protocol/core/layout.h and signal.h
DISPATCH_CALL = 1 << 60
SPEC = make_spec(2, route="flat")
CONFIG = SPEC.hash()


def header(**changes: int) -> bytes:
    """Return rank 1's header of its first dispatch, without tokens."""
    fields = {"seq": 1, "config": CONFIG, "call": DISPATCH_CALL, "status": 0, "tokens": 0, "got": 0, "expected": 0}
    fields |= {"max_tokens": SPEC.num_max_tokens_per_rank, "capacity": SPEC.capacity(1)}
    return struct.pack("<QQQiiqqii", *{**fields, **changes}.values())


def what_rank_0_sees(announced: bytes, poison: int = 0, columns: int = SPEC.hidden) -> Any:
    """Rank 0 dispatches; its segment has these bytes in place of rank 1's first dispatch."""
    buffers: list[Any] = [None, None]
    group = ThreadGroup.make(2)

    def make(rank: int) -> None:
        buffers[rank] = Buffer(group[rank], timeout_s=0.2, **buffer_kwargs(SPEC))

    threads = [threading.Thread(target=make, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    segment = buffers[0]._engine._segments.addresses[0]
    mailbox = segment + MAILBOXES + MAILBOX_BYTES  # dispatch-type ops, written by rank 1
    ctypes.memmove(mailbox + 8 + HEADER_BYTES, announced, HEADER_BYTES)
    ctypes.c_uint64.from_address(mailbox).value = 1
    ctypes.c_uint64.from_address(segment + POISON).value = poison
    try:
        buffers[0].dispatch(torch.zeros(0, columns), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    except MoeRtError as error:
        because = f" <- {type(error.__cause__).__name__}" if error.__cause__ else ""
        return f"{type(error).__name__}: {error}{because}"
    finally:
        for buffer in buffers:
            buffer.close()
    return "no error"


def test_an_honest_header_is_believed() -> None:
    assert what_rank_0_sees(header()) == "no error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": Code.CAPACITY_OVERFLOW + 1}, "CorruptPeer: dispatch #1 on rank 0: control data of rank 1"),
        ({"status": Code.POISONED}, "CorruptPeer: dispatch #1 on rank 0: control data of rank 1"),
        ({"status": -1}, "CorruptPeer: dispatch #1 on rank 0: control data of rank 1"),
        ({"seq": 2**64 - 1}, "CorruptPeer: dispatch #1 on rank 0: control data of rank 1"),
        ({"config": CONFIG ^ 1}, "ConfigMismatch: dispatch #1 on rank 0: rank 1 published"),
        ({"max_tokens": 7}, "ConfigMismatch: dispatch #1 on rank 0: max_tokens: got 7 on rank 1, expected 12"),
        ({"call": 9 << 60 | 5 << 32}, "CallOrderMismatch: dispatch #1 on rank 0: rank 1 called op 9 of layer tag 5;"),
        ({"status": Code.INVALID_ROUTING, "got": -(2**63)}, "InvalidRouting: dispatch #1 on rank 0: rank 1 got"),
    ],
    ids=str,
)
def test_header(changes: dict[str, int], message: str) -> None:
    assert what_rank_0_sees(header(**changes)).startswith(message)


def test_a_failure_counts_for_more_than_a_refusal() -> None:
    """A failure replaces even this rank's earlier refusal: after a refusal it would continue with a dead group."""
    assert what_rank_0_sees(header(), columns=SPEC.hidden - 1).startswith("InvalidInput: x: got")
    seen = what_rank_0_sees(header(config=CONFIG ^ 1), columns=SPEC.hidden - 1)
    assert seen.startswith("ConfigMismatch: dispatch #1 on rank 0: rank 1 published"), seen
    assert seen.endswith(" <- InvalidInput"), seen


@pytest.mark.parametrize("word", [2**64 - 1, 22 << 48, 1, 0x7FFF])
def test_poison_word(word: int) -> None:
    assert what_rank_0_sees(header(), word).startswith("GroupPoisoned:")


def test_any_bytes_give_an_error_of_the_family() -> None:
    """Any bytes raise a MoeRtError; other exceptions are not caught above."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.integers(0, 2**64 - 1), st.booleans())
    def check(announced: bytes, poison: int, own_config: bool) -> None:
        if own_config:  # reach the checks after the configuration's
            announced = struct.pack("<QQ", 1, CONFIG) + announced[16:]
        assert what_rank_0_sees(announced, poison if poison % 2 else 0) != "no error"

    check()
