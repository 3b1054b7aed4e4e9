"""Translation of calls to NVSHMEM functions, which the PTX does not define, to the network that lane.h declares."""

from __future__ import annotations

import re

from ptx.parse import Instruction
from ptx.writer import Writer, assign, register

_CALL = re.compile(r"(?:\((\w+)\), )?(\w+)(?:, \(([\w, ]*)\))?$")
# Templates take the arguments in their order.
_FUNCTIONS = {
    "nvshmemx_getmem_warp": "ptx_network_get(lane, {}, {}, {}, {}, false, {site})",
    "nvshmemx_getmem_block": "ptx_network_get(lane, {}, {}, {}, {}, true, {site})",
    "nvshmemx_putmem_warp": "ptx_network_put(lane, {}, {}, {}, {}, {site})",
    "nvshmem_float_p": "ptx_network_put_word(lane, {}, {}, 4, false, {}, {site})",
    "nvshmem_double_p": "ptx_network_put_word(lane, {}, {}, 8, false, {}, {site})",
    "nvshmem_uint64_p": "ptx_network_put_word(lane, {}, {}, 8, true, {}, {site})",
    "nvshmem_putmem_signal": "ptx_network_put_signal(lane, {}, {}, {}, {}, {}, {}, {}, {site})",
    "nvshmem_uint64_atomic_compare_swap": "ptx_network_replace(lane, {}, {}, {}, {}, {site})",
    "nvshmem_quiet": "ptx_network_quiet(lane, {site})",
    "nvshmem_fence": "ptx_network_fence(lane, {site})",
}


def argument(w: Writer, i: Instruction, given: list[str]) -> str | None:
    """Store an argument of a call."""
    name = _variable(w, i.operands[0], given)
    return name and assign(name, w.value(i.operands[1], given[1]))


def returned(w: Writer, i: Instruction, given: list[str]) -> str | None:
    name = _variable(w, i.operands[1], given)
    return name and assign(i.operands[0], w.value(name, given[1]))


def _variable(w: Writer, operand: str, given: list[str]) -> str | None:
    name = operand.strip("[]").removesuffix("+0")
    is_one = given[0] == "param" and len(given) == 2 and not name.startswith("%") and name in w.registers
    return name if is_one else None


def call(w: Writer, i: Instruction, given: list[str]) -> str | None:
    """Translate a call. Arguments and results are variables of the call's scope."""
    found = _CALL.match(", ".join(i.operands))
    if given != ["uni"] or found is None or found[2] not in _FUNCTIONS:
        return None
    arguments = [register(name.strip()) for name in (found[3] or "").split(",") if name.strip()]
    text = _FUNCTIONS[found[2]].format(*arguments, site=w.site)
    return f"{register(found[1])} = {text};" if found[1] else f"{text};"
