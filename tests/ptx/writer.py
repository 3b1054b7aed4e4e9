"""PTX's names and types in C++: the registers, operands, addresses and variables of one entry."""

from __future__ import annotations

import re

from ptx.parse import Entry, Registers, TranslationError

TYPES = {
    **{f"{sign}{bits}": f"{prefix}int{bits}_t" for bits in (8, 16, 32, 64) for sign, prefix in (("s", ""), ("u", "u"))},
    **{f"b{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    "f16": "Half",
    "bf16": "BFloat",
    "f32": "float",
    "f64": "double",
    "pred": "bool",
}
_SPECIAL = {"%tid.x": "ids.tid", "%ntid.x": "ids.ntid", "%ctaid.x": "ids.ctaid", "%nctaid.x": "ids.nctaid"}
_NUMBER = re.compile(r"-?\d+$|-?0x[0-9a-fA-F]+U?$")
_ADDRESS = re.compile(r"\[([%\w$.]+)(?:\+(-?\d+))?\]$")
PARAM_STRIDE = 1 << 16
DYNAMIC_GAP = 64


class Writer:
    """Turns an entry's instructions into statements; `site` is the index of the current one."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.site, self.where = 0, ""
        self.registers = {name for r in entry.body if isinstance(r, Registers) for name in r.names()}
        self.symbols = {name: at for name, (_, at) in entry.variables.items()}
        self.symbols |= {name: i * PARAM_STRIDE for i, name in enumerate(entry.params)}
        if entry.dynamic_shared is not None:
            self.symbols[entry.dynamic_shared] = dynamic_offset(entry)

    def value(self, operand: str, kind: str) -> str:
        """Return an operand as a value of a PTX type."""
        return f"as<{TYPES[kind]}>({self.bits(operand)})"

    def bits(self, operand: str) -> str:
        if operand in _SPECIAL:
            return _SPECIAL[operand]
        if operand == "%globaltimer":
            return "ptx_clock(lane)"
        if operand in self.registers:
            return register(operand)
        if operand.startswith("0f"):
            return f"uint32_t(0x{operand[2:]}u)"
        if operand.startswith("0d"):
            return f"uint64_t(0x{operand[2:]}ull)"
        if _NUMBER.match(operand):
            return f"uint64_t({operand.rstrip('U')}ll)"
        if operand in self.symbols:
            return f"uint64_t({self.symbols[operand]}ull)"
        raise TranslationError(f"{self.where}: got {operand!r}, expected a register, a number or a variable")

    def address(self, operand: str) -> str:
        found = _ADDRESS.match(operand)
        if found is None:
            raise TranslationError(f"{self.where}: got {operand!r}, expected an address")
        return f"uint64_t({self.bits(found[1])}) + {found[2] or 0}"


def dynamic_offset(entry: Entry) -> int:
    """Offset of dynamic shared memory, after an unowned gap."""
    return -(-entry.used["shared"] // 16) * 16 + DYNAMIC_GAP


def register(name: str) -> str:
    return ("v_" if name.startswith("%") else "n_") + name.lstrip("%").replace("$", "_")


def assign(target: str, value: str) -> str:
    return f"{register(target)} = bits({value});"


def label(name: str) -> str:
    return "l_" + name[1:]
