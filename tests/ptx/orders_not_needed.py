"""Barriers, releases and acquires whose absence no case can notice, each with the reason."""

from __future__ import annotations

from typing import NamedTuple


class NotNeeded(NamedTuple):
    """Instructions of a kind that a line of source asks for."""

    text: str
    place: str
    why: str


NOT_NEEDED = (
    NotNeeded(
        "bar.sync",
        "device/exchange.h: m.block().sync();  // before the flag says something else",
        "another comes before the flag's next value, but in dispatch_fetch: see test_ptx_network.py",
    ),
    NotNeeded(
        "st.release",
        "device/exchange.h: store_release(c.record->reported, 1u);",
        "the host reads behind it, which is not followed",
    ),
    NotNeeded(
        "atom.cas",
        "device/exchange.h: if (!replace_acq_rel(c.state->failed, 0u, 1u)) return;",
        "whoever fails first is told by the word alone",
    ),
    NotNeeded(
        "atom.cas",
        "device/ops.h: if (m.block_index() != 0 || m.block().rank() != 0 || "
        "!replace_acq_rel(c.state->failed, 0u, 1u)) return;",
        "as in fail",
    ),
    NotNeeded(
        "atom.cas",
        "protocol/core/link.h: replace_acq_rel(w.poison(peer), uint64_t{0}, word);",
        "the word says all that there is to say, and is read with no order",
    ),
    NotNeeded(
        "ld.acquire",
        "protocol/core/signal.h: return !reached(other_seq, load_acquire(other.signal)) && "
        "!reached(load_acquire(mailbox.signal), seq);",
        "orders words that are only compared, and here words have one order",
    ),
    NotNeeded(
        "ld.acquire",
        "protocol/core/signal.h: return load_acquire(mailbox.closed) != 0 && "
        "!reached(load_acquire(mailbox.signal), seq);",
        "as between two signals",
    ),
    NotNeeded(
        "st.release",
        "protocol/core/signal.h: MOE_RT_FN void post_closed(Mailbox& mailbox) "
        "{ store_release(mailbox.closed, uint64_t{1}); }",
        "the writer's side of the same",
    ),
)
