"""Translation of mbarriers and bulk copies to the calls that lane.h declares."""

from __future__ import annotations

from ptx.parse import Instruction
from ptx.writer import Writer, assign, register

_SHARED = ("shared", "shared::cta")
# Address spaces whose earlier writes each fence makes visible to copies: (shared, global).
_SHOWN = {
    ("proxy", "async"): "true, true",
    ("proxy", "async", "global"): "false, true",
    ("proxy", "async", "shared::cta"): "true, false",
    ("proxy", "async", "shared::cluster"): "true, false",
}


def mbarrier(w: Writer, i: Instruction, given: list[str]) -> str | None:
    """Translate an mbarrier of this block's shared memory. The state that an arrival returns must not be read."""
    what, *rest = given
    if what in ("init", "inval") and rest[:-1] and rest[0] in _SHARED and rest[1:] == ["b64"]:
        more = f"{w.value(i.operands[1], 'u32')}, " if what == "init" else ""
        return f"ptx_mbarrier_{what}(lane, {w.address(i.operands[0])}, {more}{w.site});"
    if what == "arrive":
        return _arrive(w, i, rest)
    if what == "expect_tx" and rest == ["relaxed", "cta", "shared::cta", "b64"]:
        return _arrival(w, i.operands[0], "0", w.value(i.operands[1], "u32"), releases=False)
    if what in ("try_wait", "test_wait"):
        return _wait(w, i, rest)
    return None


def _arrive(w: Writer, i: Instruction, rest: list[str]) -> str | None:
    expects, rest = rest[0] == "expect_tx", rest[rest[0] == "expect_tx" :]
    order, rest = _order(rest, "release")
    if order is None or len(rest) != 2 or rest[0] not in _SHARED or rest[1] != "b64":
        return None
    state, place, *number = i.operands
    given = w.value(number[0], "u32") if number else "1"
    text = _arrival(w, place, "1" if expects else given, given if expects else "0", releases=order == "release")
    return text if state == "_" else f"{text} {assign(state, 'uint64_t(0xf5f5f5f5f5f5f5f5ull)')}"


def _arrival(w: Writer, place: str, count: str, num_bytes: str, *, releases: bool) -> str:
    return f"ptx_mbarrier_arrive(lane, {w.address(place)}, {count}, {num_bytes}, {str(releases).lower()}, {w.site});"


def _wait(w: Writer, i: Instruction, rest: list[str]) -> str | None:
    if rest[0] != "parity":
        return None
    order, rest = _order(rest[1:], "acquire")
    if order is None or len(rest) != 2 or rest[0] not in _SHARED or rest[1] != "b64":
        return None
    passed, place, parity = i.operands[:3]  # a fourth is a time limit
    acquires = str(order == "acquire").lower()
    text = f"ptx_mbarrier_passed(lane, {w.address(place)}, {w.value(parity, 'u32')}, {acquires}, {w.site})"
    return f"{register(passed)} = {text};"


def _order(rest: list[str], usual: str) -> tuple[str | None, list[str]]:
    """Return the memory order, `usual` if the instruction names none, or None if its scope is wider than the block."""
    if rest[0] not in (usual, "relaxed"):
        return usual, rest
    return (rest[0], rest[2:]) if rest[1] == "cta" else (None, rest)


def copy(w: Writer, i: Instruction, given: list[str]) -> str | None:
    """Translate a bulk copy; other asynchronous copies are unknown."""
    match given:
        case ["async", "bulk", "shared::cluster" | "shared::cta", "global", "mbarrier::complete_tx::bytes"]:
            to, source, size, barrier = i.operands
            places = f"{w.address(to)}, {w.address(source)}, {w.value(size, 'u32')}, {w.address(barrier)}"
            return f"ptx_copy_in(lane, {places}, {w.site});"
        case ["async", "bulk", "global", "shared::cta", "bulk_group"]:
            to, source, size = i.operands
            places = f"{w.address(to)}, {w.address(source)}, {w.value(size, 'u32')}"
            return f"ptx_copy_out(lane, {places}, {w.site});"
        case ["async", "bulk", "commit_group"]:
            return f"ptx_copy_commit(lane, {w.site});"
        case ["async", "bulk", "wait_group", *read] if read in ([], ["read"]):
            return f"ptx_copy_wait(lane, {w.value(i.operands[0], 'u32')}, {str(bool(read)).lower()}, {w.site});"
    return None


def fence(w: Writer, i: Instruction, given: list[str]) -> str | None:
    """Translate a fence between lanes and copies, or between lanes and a network."""
    if given == ["acq_rel", "sys"]:
        return f"ptx_show_network(lane, {w.site});"
    if given == ["mbarrier_init", "release", "cluster"]:
        return f"ptx_show_barriers(lane, {w.site});"
    shown = _SHOWN.get(tuple(given))
    return f"ptx_show_copies(lane, {shown}, {w.site});" if shown else None
