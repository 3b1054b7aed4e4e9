"""Barriers, releases and acquires whose absence no case can notice, each with the reason."""

from __future__ import annotations

from typing import NamedTuple

from ptx.orders import Order


class NotNeeded(NamedTuple):
    """Instructions of one kind from one source line, in some kernels, in all, or in all but some."""

    text: str
    place: str
    why: str
    entries: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def speaks_of(self, kernels: str, order: Order) -> bool:
        entry = f"{kernels} {order.entry}"
        of_entry = (not self.entries or entry in self.entries) and entry not in self.but
        return of_entry and order.place == self.place and order.text.startswith(self.text)


_OPS = ("dispatch", "combine", "combine_backward")
_WAITS = (*(f"{kernels} {op}_wait" for kernels in ("mapped", "network") for op in _OPS),)


NOT_NEEDED = (
    NotNeeded(
        "bar.sync",
        "gpu/exchange.h: if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine)); block.sync();",
        "a launch that only waits then reads only the worst of several failures, and no case has more than one",
        _WAITS,
    ),
    NotNeeded(
        "bar.sync",
        "protocol/flat/routing_tiles.h: pass_tile(); coop.sync();",
        "the next tile's first barrier precedes any use of these",
    ),
    NotNeeded(
        "bar.sync",
        "gpu/exchange.h: m.block().sync();  // the flag is reused after this sync",
        "another barrier precedes the flag's next value",
        but=("network dispatch_fetch",),
    ),
    NotNeeded(
        "ld.acquire",
        "protocol/core/signal.h: while (!reached(load_acquire(mailbox.signal), seq)) {",
        "the previous launch, which gets lists, has waited for the same signals",
        ("nodes dispatch_forward",),
    ),
    NotNeeded(
        "bar.sync",
        "gpu/exchange.h: if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine)); block.sync();",
        "as above; the previous launch finds the errors",
        ("nodes dispatch_forward",),
    ),
    NotNeeded(
        "nvshmem_fence",
        "gpu/nvshmem_net.h: __device__ void fence() const { nvshmem_fence(); }",
        "every warp has called quiet in this launch, which completes the previous combine's signal",
        ("network combine_send",),
    ),
    NotNeeded(
        "st.release",
        "gpu/exchange.h: store_release(c.record->reported, 1u);",
        "it orders the host's reads, which the tool does not track",
    ),
    NotNeeded(
        "atom.cas",
        "gpu/exchange.h: if (!replace_acq_rel(c.state->failed, 0u, 1u)) return;",
        "only the value of the word decides which failure is first",
    ),
    NotNeeded(
        "atom.cas",
        "gpu/ops.h: if (m.block_index() != 0 || m.block().rank() != 0 || "
        "!replace_acq_rel(c.state->failed, 0u, 1u)) return;",
        "as in fail()",
    ),
    NotNeeded(
        "atom.cas",
        "protocol/core/link.h: replace_acq_rel(w.poison(peer), uint64_t{0}, word);",
        "the word is the whole message, and is read without an order",
    ),
    NotNeeded(
        "ld.acquire",
        "protocol/core/signal.h: return !reached(other_seq, load_acquire(other.signal)) && "
        "!reached(load_acquire(mailbox.signal), seq);",
        "it orders words that are only compared, and here all words have one order",
    ),
    NotNeeded(
        "ld.acquire",
        "protocol/core/signal.h: return load_acquire(announcers.closed) != 0 && "
        "!reached(load_acquire(mailbox.signal), seq);",
        "as for two signals",
    ),
    NotNeeded(
        "st.release",
        "protocol/core/signal.h: MOE_RT_FN void post_closed(Mailbox& mailbox) "
        "{ store_release(mailbox.closed, uint64_t{1}); }",
        "the matching release of the writer",
    ),
)
