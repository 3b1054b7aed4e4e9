"""Check that the tree obeys its own rules. Each function in RULES is one rule, and its docstring is the rule's text.

    python tools/check_tree.py [--root DIR]

It prints `path:line: message [rule]` for each finding and exits with 1 if there are any. It reads tracked files and new
files that git does not ignore; outside a checkout it walks the directory.
"""

from __future__ import annotations

import argparse
import ast
import gc
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

import prose

# Rule -> file -> why the rule does not apply there. Rules can be switched off only here.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "file_budget": {},
    "atomics_in_one_file": {
        "cuda/protocol/core/atomics.h": "the one file that names memory orders; the rest of the tree calls its helpers",
    },
    "no_wait_without_end": {
        "cuda/protocol/core/signal.h": "the bounded wait itself: it polls until the signal or the deadline",
    },
}

# Packages and modules of moe_rt, lowest level first. Each imports only from lower levels, not from its own.
ORDER = (
    "_engine errors < extras faults config < group < memory routes < plan < planner < diagnostics elastic < engine"
    " < ops < buffer < nn < parallel integrations compat < info pages < lab < lab.testing < lab.cluster lab.on_cpu"
    " < lab.bench lab.chaos lab.check < train"
)
LEVEL = {name: level for level, names in enumerate(ORDER.split(" < ")) for name in names.split()}
OUTSIDE_THE_ORDER = ("__init__", "__main__", "cli")

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
CPP = (".h", ".cpp", ".cu", ".cuh")

# The brackets keep the pattern from matching its own text.
UNFINISHED = re.compile(
    r"\b(?:T[O]DOs?|F[I]XME|X[X]X|x[f]ail|N[o]tImplementedError)\b|(?<![\w.-])/(?:w[o]rk/|t[m]p/[a-z])"
)
ATOMIC = re.compile(
    r"\bstd::atomic|\batomic_ref\b|\bmemory_order|__atomic_|__sync_|\bcuda::atomic|_mm_[slm]fence|__threadfence"
    r"|\batomic[A-Z]\w*\s*\("
)
ASM = re.compile(r"\b(?:asm|__asm|__asm__)\b[^(;]*(?=\()")
ASM_FENCE = re.compile(r'fence|membar|\.acquire|\.release|\.relaxed|\.volatile|\batom\.|\bred\.|\block\b|\(\s*""')
LOOP = re.compile(r"\b(while|for)\s*(?=\()")
ATOMIC_LOAD = re.compile(r"\bload_(?:acquire|relaxed)\w*\s*[(<]")
PICKLE = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "all_gather_object", "gather_object"}
PICKLE |= {"broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"}

CPP_COMMENT_OR_LITERAL = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|(?P<literal>R"(?P<tag>[^()\s\\]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+')",  # the look-behind leaves digit separators alone: 1'000
    re.DOTALL,
)
CPP_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
CPP_BOUNDARY = re.compile(r"[;{}]|\b(?:public|private|protected)\s*:(?!:)")
CPP_ATTRIBUTE = re.compile(r"alignas\s*\([^)]*\)|__attribute__\s*\(\(.*?\)\)|\[\[.*?\]\]", re.DOTALL)
CPP_CONTAINER = re.compile(r"\b(?:namespace|struct|class|union|enum)\b[^()]*$")

MD_FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,}).*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
MD_CODE = re.compile(r"`[^`\n]+`")
MD_LINK = re.compile(r"(?:\]\(|^ {0,3}\[[^\]^]+\]:)\s*<?(?!https?:|mailto:)([^)>\s]+)", re.MULTILINE)
MD_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", re.MULTILINE)

Tree = dict[str, str]  # path relative to the root -> text, which is empty for a binary file
Findings = Iterator[tuple[str, int, str]]  # path, line, message


def read_tree(root: Path) -> Tree:
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
        paths = {root / path for path in listed if path}
    else:
        paths = {path for path in root.rglob("*") if "__pycache__" not in path.parts}
    data = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths) if path.is_file()}
    return {path: "" if b"\0" in raw else raw.decode("utf-8", errors="replace") for path, raw in data.items()}


def files(tree: Tree, suffixes: str | tuple[str, ...], under: str | tuple[str, ...] = "") -> Iterator[tuple[str, str]]:
    return ((path, text) for path, text in tree.items() if path.endswith(suffixes) and path.startswith(under))


def python_modules(tree: Tree, under: str) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each path with the module, first, and all nodes in it."""
    return ((path, prose.nodes(path, text)) for path, text in files(tree, ".py", under))


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def cpp_code(text: str, keep_literals: bool = False) -> str:
    """Replace comments, and literals unless they are kept, by blanks. Offsets do not change."""
    return CPP_COMMENT_OR_LITERAL.sub(lambda m: m.group() if keep_literals and m["literal"] else blank(m), text)


def in_parentheses(text: str, start: int) -> str:
    """Return the text from the parenthesis that opens at `start` to the matching one."""
    end = start + 1
    while end < len(text) and text.count("(", start, end) > text.count(")", start, end):
        end += 1
    return text[start:end]


def cpp_functions(code: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of every outermost function, found by matching braces."""
    depth = start = 0  # `start` is the begin of the current declaration while no function is open
    function_depth: int | None = None
    for token in CPP_BOUNDARY.finditer(code):
        if token[0] == "{":
            head = CPP_ATTRIBUTE.sub("", code[start : token.start()])
            if function_depth is None and "(" in head and not CPP_CONTAINER.search(head):
                function_depth = depth
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if depth == function_depth:
                begin = start + len(code[start:]) - len(code[start:].lstrip())
                yield line_of(code, begin), line_of(code, token.start())
                function_depth = None
                if re.match(r"\s*[,){]", code[token.end() :]):
                    continue  # that was `member{value}` or a default `{}` in a head; the body follows
        if function_depth is None:
            start = token.end()


def runtime_imports(node: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and full dotted name of every import at run time; `from a import b` counts as `a.b`."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else []
        prefix = [*base, node.module] if node.module else base
        yield from ((node.lineno, ".".join([*prefix, alias.name])) for alias in node.names)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        node = ast.Module(body=node.orelse, type_ignores=[])
    for child in ast.iter_child_nodes(node):
        yield from runtime_imports(child, package)


def file_budget(tree: Tree) -> Findings:
    """A source file has at most 500 lines."""
    for path, text in files(tree, (".py", ".pml", *CPP)):
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            yield path, MAX_FILE_LINES + 1, f"the file has {lines} lines, at most {MAX_FILE_LINES} are allowed"


def function_budget(tree: Tree) -> Findings:
    """A function has at most 60 lines."""
    for path, text in files(tree, CPP):
        code = CPP_DIRECTIVE.sub(blank, cpp_code(text))
        if code.count("{") != code.count("}"):
            yield path, 1, "its braces do not balance outside of directives, so functions cannot be measured"
        else:
            yield from ((path, *finding) for finding in too_long(cpp_functions(code)))
    for path, nodes in python_modules(tree, under=""):
        functions = (n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        yield from ((path, *finding) for finding in too_long((f.lineno, f.end_lineno or 0) for f in functions))


def too_long(functions: Iterable[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    for first, last in functions:
        lines = last - first + 1
        if lines > MAX_FUNCTION_LINES:
            yield first, f"the function has {lines} lines, at most {MAX_FUNCTION_LINES} are allowed"


def first_sentence(tree: Tree) -> Findings:
    """A source file starts with its purpose: Python in a module docstring, C++ in a comment."""
    for path, text in files(tree, CPP):
        if not text.lstrip().startswith(("//", "/*")):
            yield path, 1, "the file does not start with a comment"
    for path, nodes in python_modules(tree, under=""):
        if nodes[0].body and not ast.get_docstring(nodes[0]):
            yield path, 1, "the module does not start with a docstring"


def atomics_in_one_file(tree: Tree) -> Findings:
    """Only cuda/protocol/core/atomics.h names atomics, memory orders and fences."""
    for path, text in files(tree, CPP):
        code = cpp_code(text, keep_literals=True)
        fences = (match for match in ASM.finditer(code) if ASM_FENCE.search(in_parentheses(code, match.end())))
        for match in (*ATOMIC.finditer(cpp_code(text)), *fences):
            yield path, line_of(text, match.start()), f"`{match.group()}` belongs in cuda/protocol/core/atomics.h"


def no_wait_without_end(tree: Tree) -> Findings:
    """No loop is endless or polls an atomic: waits go through the bounded wait in core/signal.h."""
    for path, text in files(tree, CPP, under="cuda/"):
        code = cpp_code(text)
        for match in LOOP.finditer(code):
            header = in_parentheses(code, match.end())[1:-1]
            parts = header.split(";") if match[1] == "for" else ["", header]
            condition = parts[1].strip() if len(parts) > 1 else "range"  # `for (x : range)` ends by itself
            if condition in ("", "1", "true") or ATOMIC_LOAD.search(condition):
                yield path, line_of(code, match.start()), "this loop may never end; use the bounded wait"
    for path, nodes in python_modules(tree, "moe_rt/"):
        for node in nodes:
            if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
                yield path, node.lineno, "`while True` has no end; loop until a deadline"


def no_pickle(tree: Tree) -> Findings:
    """The package neither pickles nor uses multiprocessing.shared_memory."""
    for path, nodes in python_modules(tree, "moe_rt/"):
        for line, name in runtime_imports(nodes[0], path.split("/")[:-1]):
            parts = set(name.split("."))
            if parts & PICKLE or name == "torch.load" or {"multiprocessing", "shared_memory"} <= parts:
                yield path, line, f"imports {name}"
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in PICKLE | {"shared_memory"}:
                yield path, node.lineno, f"uses {ast.unparse(node)}"
            if isinstance(node, ast.Call) and re.match(r"torch\.load\((?!.*\bweights_only=True)", ast.unparse(node)):
                yield path, node.lineno, "torch.load without weights_only=True unpickles"


def room_of(parts: list[str]) -> str:
    """Return the name in ORDER of a module: its package, or for lab the package in it."""
    _, room, inside, *_ = [*parts, "", ""]
    return f"{room}.{inside}" if room == "lab" and inside not in ("", "__init__") else room


def no_layer_points_upwards(tree: Tree) -> Findings:
    """A module of moe_rt imports only from its own package or a lower level in ORDER: packages form no cycle."""
    for path, nodes in python_modules(tree, "moe_rt/"):
        own = room_of(path.removesuffix(".py").split("/"))
        if own in OUTSIDE_THE_ORDER:
            continue
        if own not in LEVEL:
            yield path, 1, f"moe_rt.{own} has no place in ORDER in tools/check_tree.py"
        for line, name in runtime_imports(nodes[0], path.split("/")[:-1]):
            package, *_ = parts = name.split(".")
            other = room_of(parts)
            if package == "moe_rt" and other != own and LEVEL.get(other, len(LEVEL)) >= LEVEL.get(own, len(LEVEL)):
                yield path, line, f"imports {name}, which is not below moe_rt.{own}"


def nothing_unfinished(tree: Tree) -> Findings:
    """No text file holds a mark of unfinished work or a path of one machine."""
    for path, text in tree.items():
        for match in UNFINISHED.finditer(text):
            yield path, line_of(text, match.start()), f"`{match.group()}` is unfinished work or the path of one machine"


def headings(markdown: str) -> set[str]:
    """Anchors of a Markdown file's headings, as GitHub spells them; the second `x` is `x-1`."""
    seen: list[str] = []
    anchors = set()
    for heading in MD_HEADING.findall(MD_FENCED.sub(blank, markdown)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen.count(slug)}" if slug in seen else slug)
        seen.append(slug)
    return anchors


def links(tree: Tree) -> Findings:
    """A relative link in Markdown points at a file of the tree, and its #anchor at a heading of that file."""
    for path, text in files(tree, ".md"):
        prose = MD_CODE.sub(blank, MD_FENCED.sub(blank, text))
        for match in MD_LINK.finditer(prose):
            name, _, anchor = unquote(match[1]).partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path
            line = line_of(prose, match.start())
            if target not in tree and target != "." and not any(file.startswith(target + "/") for file in tree):
                yield path, line, f"the link {match[1]} points at no file of the tree"
            elif anchor and target.endswith(".md") and anchor not in headings(tree[target]):
                yield path, line, f"the link {match[1]} points at no heading of {target}"


def openings(tree: Tree) -> Findings:
    """A docstring or comment does not open with a fragment, such as "Of ...", "Where ..." or "Whether ..."."""
    for path, text in files(tree, (".py", *CPP)):
        for line, words in prose.openings(path, text):
            yield path, line, f"it opens with a fragment: {words} ..."


def private_words(tree: Tree) -> Findings:
    """Prose uses the terms of the field, not the words that tools/prose.py lists."""
    for path, text in files(tree, (".py", ".md", *CPP)):
        for line, word in prose.private_words(path, text):
            yield path, line, f"`{word}` is not a term of the field"


def readable_documents(tree: Tree) -> Findings:
    """Prose of a document has at most 120 columns, and its sentences have at most 60 words."""
    for path, text in files(tree, ".md"):
        for number, line in enumerate(prose.prose_of(text).split("\n"), 1):
            columns = len(prose.CODE.sub("", line))  # a command does not break
            if columns > prose.MAX_COLUMNS:
                yield path, number, f"the line has {columns} columns, at most {prose.MAX_COLUMNS} are allowed"
        for number, sentence in prose.sentences(text):
            count = prose.words(sentence)
            if count > prose.MAX_SENTENCE_WORDS:
                yield path, number, f"a sentence has {count} words, at most {prose.MAX_SENTENCE_WORDS} are allowed"


RULES: tuple[Callable[[Tree], Findings], ...] = (
    file_budget,
    function_budget,
    first_sentence,
    atomics_in_one_file,
    no_wait_without_end,
    no_pickle,
    no_layer_points_upwards,
    nothing_unfinished,
    links,
    openings,
    private_words,
    readable_documents,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that the tree obeys its own rules.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="default: this tree")
    gc.disable()  # it would go through the nodes of all modules again and again
    tree = read_tree(parser.parse_args().root)
    status = 0
    for rule in RULES:
        for path, line, message in rule(tree):
            if path not in EXCEPTIONS.get(rule.__name__, {}):
                print(f"{path}:{line}: {message} [{rule.__name__}]")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
