"""Read each kernel's PTX: the width of its moves, and its memory orders where the protocol requires them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_FUNCTION = re.compile(r"^(?:\.visible\s+|\.weak\s+|\.extern\s+)?\.func\b", re.MULTILINE)
_MOVE = re.compile(r"\b(ld|st)((?:\.[\w:]+)+)[ \t]")
_OWN_MEMORY = {"shared", "local", "param", "const"}
_BITS = re.compile(r"[busf](\d+)$")


@dataclass(frozen=True)
class Orders:
    """Counts of an entry's accesses to global or generic memory."""

    wide_loads: int
    wide_stores: int
    releases: int
    acquires: int
    last_block: int


def read_orders(ptx: str) -> dict[str, Orders]:
    """Return the counts by kernel name."""
    _, *parts = _ENTRY.split(ptx)
    orders = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        body = _FUNCTION.split(body)[0]
        moves = [(match[1], match[2][1:].split(".")) for match in _MOVE.finditer(body)]
        orders[name] = Orders(
            wide_loads=sum(kind == "ld" and _num_bytes(words) >= 16 for kind, words in moves),
            wide_stores=sum(kind == "st" and _num_bytes(words) >= 16 for kind, words in moves),
            releases=_count(r"\bst\.release\.sys\b", body),
            acquires=_count(r"\bld\.acquire\.sys\b", body),
            last_block=_count(r"\batom\.(?:[\w:]+\.)*acq_rel\.gpu\b", body),
        )
    return orders


def _count(pattern: str, body: str) -> int:
    return len(re.findall(pattern, body))


def _num_bytes(words: list[str]) -> int:
    """Bytes of one access, or 0 if it is not to global or generic memory. `words` are the opcode's parts after the
    first."""
    if any(word.split("::")[0] in _OWN_MEMORY for word in words):
        return 0
    bits = _BITS.match(words[-1])
    lanes = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
    return lanes * int(bits[1]) // 8 if bits else 0


_SENDS = ("dispatch_send", "combine_send", "combine_backward_send")
_RECEIVES = ("dispatch_receive", "combine_receive", "combine_backward_receive")
_EXPECTED: dict[str, tuple[tuple[str, ...], Callable[[Orders], int]]] = {
    "loads of 16 bytes": (("dispatch_receive", "combine_send", "combine_receive"), lambda o: o.wide_loads),
    "stores of 16 bytes": (("dispatch_receive", "combine_send", "combine_receive"), lambda o: o.wide_stores),
    "st.release.sys, which announces": (_SENDS, lambda o: o.releases),
    "an atom of acq_rel.gpu, which counts blocks": (_SENDS, lambda o: o.last_block),
    "ld.acquire.sys, which waits": (_RECEIVES, lambda o: o.acquires),
}


def find_problems(orders: dict[str, Orders]) -> list[str]:
    """List what the protocol's kernels lack. The variant's rows must be a multiple of 16 bytes."""
    problems = [f"got no kernel {name}" for name in (*_SENDS, *_RECEIVES) if name not in orders]
    return problems + [
        f"{name}: got no {what}"
        for what, (names, count) in _EXPECTED.items()
        for name in names
        if name in orders and count(orders[name]) == 0
    ]
