"""Finds the functions of a Python or C++ source file by name, for tools that point at a place in it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from check_tree import CPP, CPP_ATTRIBUTE, CPP_DIRECTIVE, blank, cpp_code, cpp_functions

CPP_NAME = re.compile(r"((?:\w+::)*(?:operator[^\s(]*|~?\w+))\s*\(")
CPP_TEMPLATE = re.compile(r"\btemplate\s*<[^{}]*?>\s*(?=\w|\[)")
NO_NAMES = {"__launch_bounds__", "requires", "noexcept", "decltype", "alignas"}


def named_functions(path: str, text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, first offset and end offset of every function of a file; a method's name is `Class.method`.

    In C++ only outermost functions are found, and a method that is defined in its class has no prefix.
    """
    lines = [0, *(match.end() for match in re.finditer(r"\n", text)), len(text)]
    if path.endswith(".py"):
        yield from ((name, lines[first - 1], lines[last]) for name, first, last in _of_python(ast.parse(text), ""))
    elif path.endswith(CPP):
        code = CPP_DIRECTIVE.sub(blank, cpp_code(text))
        for first, last in cpp_functions(code):
            start, end = lines[first - 1], lines[last]
            head = CPP_ATTRIBUTE.sub("", CPP_TEMPLATE.sub("", code[start:end]))
            names = (match[1] for match in CPP_NAME.finditer(head) if match[1] not in NO_NAMES)
            if name := next(names, ""):
                yield name, start, end


@functools.lru_cache(maxsize=64)
def _functions_of(path: str, text: str) -> tuple[tuple[str, int, int], ...]:
    return tuple(named_functions(path, text))


def scopes(path: str, text: str, function: str) -> list[tuple[int, int]]:
    """Return first and end offset of every function of that name; all of the file for an empty name."""
    if not function:
        return [(0, len(text))]
    return [(start, end) for name, start, end in _functions_of(path, text) if name == function]


def find_once(path: str, text: str, function: str, what: str) -> int:
    """Return the offset of a text that occurs once in the functions of a name; raise ValueError otherwise."""
    places = [start + match.start() for start, end in scopes(path, text, function)
              for match in re.finditer(re.escape(what), text[start:end])]  # fmt: skip
    if len(set(places)) != 1:
        where = f"{function} of {path}" if function else path
        raise ValueError(f"its text occurs {len(set(places))} times in {where}, expected once")
    return places[0]


def _of_python(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = prefix + child.name
            if not isinstance(child, ast.ClassDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                yield name, first, child.end_lineno or first
            yield from _of_python(child, name + ".")
        else:
            yield from _of_python(child, prefix)
