"""Barriers, releases and acquires whose absence no case can notice, each with the reason."""

from __future__ import annotations

from typing import NamedTuple

from ptx.orders import Order


class NotNeeded(NamedTuple):
    """Instructions of a kind that a line of source asks for, in some kernels, in all, or in all but some."""

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
        "device/exchange.h: if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine)); block.sync();",
        "behind it a launch that only waits reads nothing but which of several failures is the worst, and here is one",
        _WAITS,
    ),
    NotNeeded(
        "bar.sync",
        "protocol/flat/routing_tiles.h: pass_tile(); coop.sync();",
        "the next tile's first barrier comes before any of these are used; behind the last tile a lane reads its own",
    ),
    NotNeeded(
        "bar.sync",
        "device/exchange.h: m.block().sync();  // before the flag says something else",
        "another comes before the flag's next value",
        but=("network dispatch_fetch",),
    ),
    NotNeeded(
        "ld.acquire",
        "protocol/core/signal.h: while (!reached(load_acquire(mailbox.signal), seq)) {",
        "the launch before, which gets lists, has waited for the same signals",
        ("nodes dispatch_forward",),
    ),
    NotNeeded(
        "bar.sync",
        "device/exchange.h: if (!mine.ok()) fetch_min_relaxed(m.shared().worst, severity(mine)); block.sync();",
        "as above, and what is wrong is found by the launch before",
        ("nodes dispatch_forward",),
    ),
    NotNeeded(
        "nvshmem_fence",
        "device/nvshmem_net.h: __device__ void fence() const { nvshmem_fence(); }",
        "every warp has called quiet in this launch, and with it has waited for the combine's signal before",
        ("network combine_send",),
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
        "protocol/core/signal.h: return load_acquire(announcers.closed) != 0 && "
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
