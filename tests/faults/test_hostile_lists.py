"""Inconsistent lists, even with valid numbers: the dispatch that reads them names the peer."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuzz.rewriter import lists_of
from support.routing import buffer_kwargs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import CorruptPeer

MAILBOXES, MAILBOX_BYTES, HEADER_BYTES = 256, 128, 56  # cuda/protocol/core/layout.h and signal.h
TOKENS, TOPK = 3, 2
PULL_WORDS = 4  # token, slot, first, copies


class Lists:
    """Views of rank 1's lists for rank 0, `TOKENS` tokens of `TOPK` copies each, as words to rewrite."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self._start = buffers[1]._engine._segments.addresses[1]
        self._at = next(at for at in (lists_of(buffers[1], w) for w in range(2)) if self._word(at["copy_offs"], 1) > 0)
        assert [self._word(self._at[name], 1) for name in ("pull_offs", "copy_offs")] == [TOKENS, TOKENS * TOPK]

    def _word(self, at: int, index: int) -> int:
        return ctypes.c_int32.from_address(self._start + at + 4 * index).value

    def rewrite(self, name: str, index: int, value: int) -> None:
        ctypes.c_int32.from_address(self._start + self._at[name] + 4 * index).value = value

    def rewrite_pull(self, token: int, first: int, copies: int) -> None:
        self.rewrite("pulls", token * PULL_WORDS + 2, first)
        self.rewrite("pulls", token * PULL_WORDS + 3, copies)


def nothing(lists: Lists) -> None:
    pass


def copies_of_another_token(lists: Lists) -> None:
    lists.rewrite_pull(1, 0, 2)


def nobodys_first_copy(lists: Lists) -> None:
    lists.rewrite_pull(0, 1, 1)


def nobodys_last_copy(lists: Lists) -> None:
    lists.rewrite_pull(TOKENS - 1, (TOKENS - 1) * TOPK, TOPK - 1)


def copies_without_tokens(lists: Lists) -> None:
    lists.rewrite("pull_offs", 1, 0)


WRONG = (copies_of_another_token, nobodys_first_copy, nobodys_last_copy, copies_without_tokens)


def on_both(act: Callable[[int], Any]) -> None:
    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(params=["experts", "tokens"])
def buffers(request: pytest.FixtureRequest) -> Iterator[list[Buffer]]:
    """Return two ranks after a dispatch and a combine. The next dispatch takes the same window."""
    group, made = ThreadGroup.make(2), dict[int, Buffer]()
    spec = make_spec(2, num_topk=TOPK, num_experts=6, route="flat", layout=request.param)

    def act(rank: int) -> None:
        buffer = made[rank] = Buffer(group[rank], timeout_s=60.0, **buffer_kwargs(spec))
        recv_x, recv_weights, handle = buffer.dispatch(*mine(buffer, rank))
        buffer.combine(recv_x, None if spec.by_token else recv_weights, handle)

    on_both(act)
    yield [made[0], made[1]]
    for buffer in made.values():
        buffer.close()


def mine(buffer: Buffer, rank: int) -> tuple[torch.Tensor, ...]:
    num_tokens = TOKENS * rank
    ids = torch.tensor([[0, 1]] * num_tokens, dtype=torch.int64).view(num_tokens, TOPK)
    return torch.ones(num_tokens, buffer.spec.hidden), ids, torch.ones(num_tokens, TOPK)


def announce_again(buffers: list[Buffer]) -> None:
    """Announce rank 1's second dispatch, with the present lists."""
    mailbox = buffers[0]._engine._segments.addresses[0] + MAILBOXES + MAILBOX_BYTES
    header = ctypes.string_at(mailbox + 8 + HEADER_BYTES, HEADER_BYTES)
    ctypes.memmove(mailbox + 8, struct.pack("<Q", 2) + header[8:], HEADER_BYTES)
    ctypes.c_uint64.from_address(mailbox).value = 2


@pytest.mark.parametrize("wrong", [nothing, *WRONG])
def test_dispatch_names_the_peer(buffers: list[Buffer], wrong: Callable[[Lists], None]) -> None:
    wrong(Lists(buffers))
    announce_again(buffers)
    if wrong is nothing:
        buffers[0].dispatch(*mine(buffers[0], 0))
        return
    with pytest.raises(CorruptPeer, match=r"dispatch #2 on rank 0: control data of rank 1 cannot be true") as raised:
        buffers[0].dispatch(*mine(buffers[0], 0))
    assert raised.value.peer == 1
