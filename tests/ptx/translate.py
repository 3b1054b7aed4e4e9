"""Translates PTX to C++: one function for each entry, which lane.h's runtime calls for each lane."""

from __future__ import annotations

import json
import re

from ptx.instructions import statement
from ptx.parse import Entry, Instruction, Label, Registers, Scope
from ptx.writer import Writer, dynamic_offset, label, register

_C_TYPES = {"pred": "bool", "16": "uint16_t", "32": "uint32_t", "64": "uint64_t"}
# Value of a register that was never written.
_GARBAGE = {"bool": "false", "uint16_t": "0xf5f5", "uint32_t": "0xf5f5f5f5u", "uint64_t": "0xf5f5f5f5f5f5f5f5ull"}


def translate(entry: Entry) -> str:
    """Return the C++ source of an entry.

    Raises:
        TranslationError: names the first unknown line.
    """
    writer = Writer(entry)
    named = set(re.findall(r"%?[\w$]+", entry.text))
    lines, sites = [], []
    for item in entry.body:
        if isinstance(item, Registers):
            lines += _declared(item, named)
        elif isinstance(item, Label):
            lines.append(f"{label(item.name)}:;")
        elif isinstance(item, Scope):
            lines.append("{" if item.opens else "}")
        else:
            writer.site = len(sites)
            lines.append(statement(writer, item))
            sites.append(_site(item, entry))
    return "\n".join(
        [
            f"// {entry.name}, translated from PTX.",
            '#include "arithmetic.h"',
            '#include "lane.h"',
            "",
            "namespace ptx {",
            f"static void run(Lane& lane, const Ids& ids) {{\n{chr(10).join(lines)}\n}}",
            f"static const Site kSites[] = {{\n{chr(10).join(sites)}\n}};",
            f"static unsigned char kMarks[{len(sites)} + 1];",
            f"static const uint32_t kParams[] = {{{', '.join(map(str, entry.params.values()))}}};",
            "}  // namespace ptx",
            'extern "C" const ptx::Entry ptx_entry = {',
            f'  "{entry.name}", ptx::run, ptx::kParams, {len(entry.params)}, {entry.used["shared"]},',
            f"  {dynamic_offset(entry)}, {entry.used['local']}, {entry.max_threads}, ptx::kSites,",
            f"  {len(sites)}, ptx::kMarks}};",
            "",
        ]
    )


def _declared(registers: Registers, named: set[str]) -> list[str]:
    kind = _C_TYPES["pred" if registers.kind == "pred" else registers.kind[1:]]
    names = [register(name) for name in registers.names() if name in named]
    return [f"{kind} {name}; {name} = {_GARBAGE[kind]};" for name in names]


def _site(item: Instruction, entry: Entry) -> str:
    return f"{{{item.line}, {json.dumps(item.text)}, {json.dumps(item.where)}, {json.dumps(entry.name)}}},"
