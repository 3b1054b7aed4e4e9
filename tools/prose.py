"""Measures how comments, docstrings and documents read; tools/check_tree.py enforces its rules.

    python tools/prose.py [PATH ...]

Prints for Python, C++ and documents: the share of comment blocks and docstrings that open with a fragment, private
words per 1,000 words, and for documents the median, 90th percentile and maximum of words in a sentence.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import statistics
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

CPP = (".h", ".cpp", ".cu", ".cuh")
MAX_COLUMNS, MAX_SENTENCE_WORDS = 120, 60

# A sentence about code names its subject first. These words begin a clause that depends on the code above it.
FRAGMENT = re.compile(
    r"(?:Of|As|Where|Whether|What|Who|Whose|Which|How|Those|That|The same|Behind|Besides?|Between|By|From|In|On|With"
    r"|For|Before|After|Without|Until|To)\b"
)
# Words of one author for which the field has others, such as: reported, received, other than, no rank, N, times out.
PRIVATE = re.compile(
    r"\b(?:whoever|whichever|besides?|told|tells?|hears?|heard|astray|lies?|in vain|nobody|so many|at once|behind|alone"
    r"|stands? for|those that|the ones? that|there (?:is|are) (?:none|no)|made of|of its own(?! \w)|of those)\b",
    re.IGNORECASE,
)
FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,}).*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)|<!--.*?-->", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"^\s*(?:\||#|!\[|<|\[[^\]]+\]:)")  # rows of tables, headings, figures, HTML, targets of links
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*(\d])")
NO_COMMENT = re.compile(r"#!|#\s*(?:type:|noqa|fmt:|ruff:|mypy:)|//\s*(?:clang-format|NOLINT)")


@functools.cache
def nodes(path: str, text: str) -> list[ast.AST]:
    """Return a module, first, and all nodes in it; each file is parsed once for all rules."""
    return list(ast.walk(ast.parse(text, path)))


def docstrings(path: str, text: str) -> Iterator[tuple[int, str]]:
    for node in nodes(path, text):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc:
                yield node.body[0].lineno, doc


def comment_lines(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and comment of each line that holds nothing else."""
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                yield token.start[0], token.string
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.lstrip().startswith("//"):
                yield number, line.strip()


@functools.cache
def blocks(path: str, text: str) -> list[tuple[int, str]]:
    """Return line and text of every docstring and of every run of comment lines."""
    return [*(docstrings(path, text) if path.endswith(".py") else ()), *runs_of_comments(path, text)]


def runs_of_comments(path: str, text: str) -> Iterator[tuple[int, str]]:
    first, last, block = 0, -1, list[str]()
    for number, comment in comment_lines(path, text):
        if NO_COMMENT.match(comment):
            continue
        if number != last + 1:
            if block:
                yield first, " ".join(block)
            first, block = number, []
        block.append(comment.lstrip("/# ").strip())
        last = number
    if block:
        yield first, " ".join(block)


def prose_of(markdown: str) -> str:
    """Return a document's text with everything but its sentences blanked; line numbers stay."""
    text = FENCED.sub(lambda match: re.sub(r"[^\n]", "", match.group()), markdown)
    return "\n".join("" if NO_PROSE.match(line) else LINK.sub(r"\1", line) for line in text.split("\n"))


def sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every sentence; an item of a list and a paragraph end one."""
    prose, line = prose_of(markdown), 1
    for part in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s))", prose):
        at = line
        for sentence in SENTENCE_END.split(part):
            if sentence.strip():
                yield at, re.sub(r"\s+", " ", sentence).strip()
        line += part.count("\n")


def openings(path: str, text: str) -> Iterator[tuple[int, str]]:
    for line, block in blocks(path, text):
        if len(block.split()) > 2 and FRAGMENT.match(block):
            yield line, " ".join(block.split()[:6])


def private_words(path: str, text: str) -> Iterator[tuple[int, str]]:
    texts = [(1, prose_of(text))] if path.endswith(".md") else blocks(path, text)
    for line, block in texts:
        for match in PRIVATE.finditer(CODE.sub(lambda code: " " * len(code.group()), block)):
            yield line + block.count("\n", 0, match.start()), match.group()


def words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def report(name: str, files: list[tuple[str, str]]) -> str:
    """Return the figures of files of one kind in one line."""
    private = sum(len(list(private_words(*file))) for file in files)
    if name == "documents":
        lengths = sorted(words(sentence) for _, text in files for _, sentence in sentences(text))
        total = sum(len(text.split()) for _, text in files)
        shape = f"sentences of {statistics.median(lengths):.0f} words, 90 %: {lengths[len(lengths) * 9 // 10]}"
        shape += f", longest {lengths[-1]}; {total} words with code and tables"
        in_all = sum(lengths)
    else:
        found = [block for file in files for _, block in blocks(*file)]
        shape = f"fragments {sum(len(list(openings(*file))) for file in files) / len(found):.1%} of {len(found)} blocks"
        in_all = sum(map(words, found))
    return f"{name:9} {len(files):4} files  {in_all:6} words  private {1000 * private / in_all:4.1f} per 1,000  {shape}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["."])
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *parser.parse_args().paths]
    paths = subprocess.run(listed, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for name, suffixes in (("Python", (".py",)), ("C++", CPP), ("documents", (".md",))):
        files = [(path, Path(path).read_text()) for path in paths if path.endswith(suffixes) and Path(path).is_file()]
        if files:
            print(report(name, files))


if __name__ == "__main__":
    main()
