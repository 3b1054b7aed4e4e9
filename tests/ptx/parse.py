"""A PTX parser: a module's entries, their declarations, and their instructions with source lines.

It understands only what the project's kernels contain. Anything else is an error that names the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

_COMMENT = re.compile(r"//.*")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_PARAM = re.compile(r"\.param (?:\.align \d+ )?\.(b8|[buf](?:32|64)) (\w+)(?:\[(\d+)\])?,?$")
_REGISTERS = re.compile(r"\.reg \.(pred|[bsuf]\d+)\s+(%?[\w$]+)(?:<(\d+)>)?$")
_VARIABLE = re.compile(r"\.(local|shared) \.align (\d+) \.b8\s+(\w+)\[(\d+)\]$")
_DYNAMIC = re.compile(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\];")
_SHARED = re.compile(r"^\.weak \.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];$", re.MULTILINE)
_ZEROS = re.compile(r"^\.weak \.global \.align \d+ \.b8 ([\w$]+)\[\d+\];$", re.MULTILINE)
_LABEL = re.compile(r"(\$\w+):$")
_CALL = re.compile(r"\s*call\b")
_LOC = re.compile(r"\.loc\s+(\d+) (\d+) \d+")
_FILE = re.compile(r"\.file\s+(\d+) \"(.*)\"")
_INSTRUCTION = re.compile(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?$")
_MAX_THREADS = re.compile(r"\.maxntid (\d+), 1, 1$")
_WIDTHS = {"b8": 1, **{f"{kind}{bits}": bits // 8 for kind in "buf" for bits in (32, 64)}}
# Statements that do not affect the meaning of instructions.
_HINTS = (".pragma", ".loc\t", ".minnctapersm")


class TranslationError(Exception):
    """Unknown PTX; the tool does not guess."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; `line` counts from the entry's first."""

    line: int
    where: str
    text: str
    predicate: str | None
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Scope:
    opens: bool


@dataclass(frozen=True)
class Registers:
    """A register declaration; `count` is None for a single register."""

    kind: str
    name: str
    count: int | None

    def names(self) -> list[str]:
        return [self.name] if self.count is None else [f"{self.name}{i}" for i in range(self.count)]


@dataclass
class Entry:
    """A kernel. Addresses of variables count from the start of their space."""

    name: str
    text: str
    dynamic_shared: str | None
    params: dict[str, int] = field(default_factory=dict)  # name -> bytes
    variables: dict[str, tuple[str, int]] = field(default_factory=dict)  # name -> (space, offset)
    used: dict[str, int] = field(default_factory=lambda: {"shared": 0, "local": 0})
    max_threads: int = 0
    zeros: frozenset[str] = frozenset()  # constants of the module that are all zero
    body: list[Instruction | Label | Scope | Registers] = field(default_factory=list)


def parse(text: str) -> list[Entry]:
    """Return the entries of a module."""
    dynamic = _DYNAMIC.search(text)
    files = {number: _short(path) for number, path in _FILE.findall(text)}
    entries = []
    for piece in re.split(r"(?=^\.visible \.entry )", text, flags=re.MULTILINE)[1:]:
        name = _ENTRY.match(piece)
        if name is None:
            raise TranslationError(f"got {piece.splitlines()[0]!r}, expected the head of an entry")
        end = re.search(r"^}$", piece, flags=re.MULTILINE)
        assert end is not None
        entry = Entry(name[1], piece[: end.end()], dynamic[1] if dynamic else None)
        entry.zeros = frozenset(_ZEROS.findall(text))
        for align, variable, size in _SHARED.findall(text):
            if variable in entry.text:
                _place(entry, variable, "shared", int(align), int(size))
        _read(entry, files)
        entries.append(entry)
    return entries


def _place(entry: Entry, name: str, space: str, align: int, size: int) -> None:
    at = -(-entry.used[space] // align) * align
    entry.variables[name] = (space, at)
    entry.used[space] = at + size


def _short(path: str) -> str:
    """Return a source's path below the directory of CUDA's sources, or its name."""
    parts: list[str] = []
    for part in PurePath(path).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts[parts.index("cuda") :]) if "cuda" in parts else parts[-1]


def _read(entry: Entry, files: dict[str, str]) -> None:
    where, depth, call = "", 0, ""
    for number, line in enumerate(entry.text.splitlines()[1:], 2):
        if call or _CALL.match(line):  # over several lines
            call += f"{line.strip()} "
            if ";" not in line:
                continue
            line, call = call, ""
        if loc := _LOC.match(line.strip()):
            where = f"{files.get(loc[1], '?')}:{loc[2]}"
        for statement in _statements(line):
            if statement in "{}":
                depth += 1 if statement == "{" else -1
                if depth > 1 or (depth == 1 and statement == "}"):
                    entry.body.append(Scope(statement == "{"))
            elif not _declare(entry, statement, in_call=depth > 1):
                entry.body.append(_instruction(entry, statement, number, where))


def _statements(line: str) -> Iterator[str]:
    rest = _COMMENT.sub("", line).strip()
    if rest.startswith("{"):
        yield "{"
        rest = rest[1:]
    for part in rest.split(";"):
        if text := part.strip():
            yield text


def _declare(entry: Entry, statement: str, *, in_call: bool) -> bool:
    """True if the statement is a declaration; the entry then records it."""
    if statement in ("(", ")") or statement.startswith(_HINTS):
        return True
    param = _PARAM.match(statement)
    if param and in_call:  # parameter of a called function: a variable of this scope
        entry.body.append(Registers(f"b{8 * _WIDTHS[param[1]]}", param[2], None))
        return param[3] is None
    if param:
        entry.params[param[2]] = _WIDTHS[param[1]] * int(param[3] or 1)
    elif threads := _MAX_THREADS.match(statement):
        entry.max_threads = int(threads[1])
    elif registers := _REGISTERS.match(statement):
        count = int(registers[3]) if registers[3] else None
        entry.body.append(Registers(registers[1], registers[2], count))
    elif variable := _VARIABLE.match(statement):
        _place(entry, variable[3], variable[1], int(variable[2]), int(variable[4]))
    elif label := _LABEL.match(statement):
        entry.body.append(Label(label[1]))
    else:
        return False
    return True


def _instruction(entry: Entry, statement: str, line: int, where: str) -> Instruction:
    found = _INSTRUCTION.match(statement)
    if found is None:
        raise TranslationError(f"{entry.name}, line {line}: got {statement!r}, expected an instruction")
    operands = tuple(_operands(found[3] or ""))
    return Instruction(line, where, " ".join(statement.split()), found[1], found[2], operands)


def _operands(text: str) -> Iterator[str]:
    """Split at commas outside brackets and braces."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()
