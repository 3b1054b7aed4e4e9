"""Records which tests execute which block of moe_rt, so that a mutant runs only tests that execute its line.

    python tools/executed.py [TEST_FILE ...]

A scratch copy of the tree is instrumented: each block of a function first stores a byte in a file that all processes
map. So ranks that are processes count as well, also killed ones, and a test costs little more than without. Results are
kept in build/executed by test file, until that file changes. A block is known by its function and its place in it, so
that edits elsewhere keep the results.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from functions import named_functions
from generated import CPP, parse
from scratch_tree import ScratchTree
from tree_sitter import Node

ROOT = Path(__file__).resolve().parents[1]
MARKS = "moe_rt_marks"  # the module that instrumented sources import
MARK_FILE = "MOE_RT_MARKS"
RECORD = "MOE_RT_RECORD"
AT_IMPORT = "at import"  # the name of what is executed before the first test
KEPT = "build/executed"
BUILDING = threading.Lock()
LIMIT_S = 40.0  # for all tests of a file: about as long as a mutant runs those of one file

# Maps the file of marks. A process without that file marks private memory, which is not read.
MARKS_SOURCE = f"""import mmap, os
try:
    with open(os.environ["{MARK_FILE}"], "r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)
except (KeyError, OSError):
    marks = bytearray({{size}})
"""
CPP_MARKS = f"""#ifndef MOE_RT_MARKS
#define MOE_RT_MARKS
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define moe_rt_mark(n) ((void)0)
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <cstdlib>
#include <type_traits>
inline char* moe_rt_marks() {{
  static char* const marks = [] {{
    const char* const name = std::getenv("{MARK_FILE}");
    const int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    struct stat found {{}};
    if (file < 0 || fstat(file, &found)) return static_cast<char*>(nullptr);
    void* const memory = mmap(nullptr, size_t(found.st_size), PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
  }}();
  return marks;
}}
constexpr void moe_rt_mark(int n) {{
  if (!std::is_constant_evaluated())
    if (char* const marks = moe_rt_marks()) marks[n] = 1;
}}
#endif
#endif
"""
# A plug-in of pytest: after each test, what it marked and how long it took. The first case of each test comes first,
# then the second of each, so that little is lost where the time is up.
PLUGIN = f"""import base64, json, os, time, zlib
from collections import Counter
import pytest
from {MARKS} import marks

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    counts = Counter()
    turns = []
    for item in items:
        name = item.nodeid.split("[")[0]
        turns.append(counts[name])
        counts[name] += 1
    items[:] = [item for _, item in sorted(zip(turns, items), key=lambda pair: pair[0])]

def note(name, seconds):
    with open(os.environ["{RECORD}"], "a") as record:
        seen = base64.b85encode(zlib.compress(bytes(marks))).decode()
        record.write(json.dumps([name, seconds, seen]) + "\\n")
    marks[:] = bytes(len(marks))

def pytest_collection_finish():
    note("{AT_IMPORT}", 0.0)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    start = time.monotonic()
    result = yield
    note(item.nodeid, time.monotonic() - start)
    return result
"""

Block = tuple[str, str, int]  # file, function, place in the function


class Marking(ast.NodeTransformer):
    """Inserts a mark at the begin of each block of each function."""

    def __init__(self, file: str, first: int) -> None:
        self.file, self.first = file, first
        self.blocks: list[tuple[Block, int, int]] = []  # with first and last line
        self._names: list[str] = []
        self._counts: list[int] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        node.body = [self.visit(child) for child in node.body]
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._names.append(node.name)
        self._counts.append(0)
        self._mark(node)
        self._counts.pop()
        self._names.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if self._counts and isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            self._mark(node)
            return node
        return super().generic_visit(node)

    def _mark(self, node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                chained = name == "orelse" and isinstance(node, ast.If) and isinstance(block[0], ast.If)
                marked = [] if chained and len(block) == 1 else [self._new(node if name == "body" else None, block)]
                documented = isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant)
                head = block[:1] if documented and name == "body" else []
                setattr(node, name, [*head, *marked, *(self.visit(child) for child in block[len(head) :])])
        for child in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self._mark(child)

    def _new(self, head: ast.AST | None, block: list[ast.stmt]) -> ast.stmt:
        number = self.first + len(self.blocks)
        first = block[0].lineno if head is None or not hasattr(head, "lineno") else head.lineno
        if self._counts[-1] and head is not None:  # the head of an inner block belongs to the outer one
            first = block[0].lineno
        self.blocks.append(((self.file, ".".join(self._names), self._counts[-1]), first, block[-1].end_lineno or first))
        self._counts[-1] += 1
        return ast.parse(f"_moe_rt_marks[{number}] = 1").body[0]


def instrumented(file: str, text: str, first: int) -> tuple[str, list[tuple[Block, int, int]]]:
    """Return the source with marks from number `first` on, and its blocks with their lines."""
    marking = Marking(file, first)
    tree = marking.visit(ast.parse(text))
    if not marking.blocks:
        return text, []
    place = 0
    while place < len(tree.body) and (
        isinstance(tree.body[place], ast.Expr) or getattr(tree.body[place], "module", "") == "__future__"
    ):
        place += 1
    tree.body.insert(place, ast.parse(f"from {MARKS} import marks as _moe_rt_marks").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)), marking.blocks


def instrumented_cpp(file: str, text: str, first: int) -> tuple[str, list[tuple[Block, int, int]]]:
    """Return the same for C++, where blocks in loops count as part of the block around the loop."""
    functions = list(named_functions(file, text))
    blocks: list[tuple[Block, int, int]] = []
    counts: Counter[str] = Counter()
    parts, at = [CPP_MARKS], 0
    for node in _blocks(parse(file, text)):
        name = next((name for name, start, end in functions if start <= node.start_byte < end), "")
        parts += [text[at : node.start_byte + 1], f" moe_rt_mark({first + len(blocks)});"]
        at = node.start_byte + 1
        blocks.append(((file, name, counts[name]), node.start_point[0] + 1, node.end_point[0] + 1))
        counts[name] += 1
    return "".join((*parts, text[at:])) if blocks else text, blocks


def _blocks(node: Node) -> Iterator[Node]:
    if node.type == "compound_statement" and node.parent is not None and node.parent.type != "switch_statement":
        yield node
    for child in node.children:
        if node.type not in ("for_statement", "while_statement", "do_statement", "for_range_loop", "ERROR"):
            yield from _blocks(child)


def blocks_of(file: str, text: str) -> list[tuple[Block, int, int]]:
    """Return the blocks of a file with their first and last lines."""
    return (instrumented if file.endswith(".py") else instrumented_cpp)(file, text, 0)[1]


def sources(root: Path) -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "moe_rt", "cuda"], cwd=root, check=True, stdout=subprocess.PIPE, text=True
    )
    return {file: (root / file).read_text() for file in listed.stdout.split() if file.endswith((".py", *CPP))}


class MarkedTree(ScratchTree):
    """A scratch tree whose moe_rt says which of its blocks a test executes."""

    def __init__(self, source: Path, root: Path) -> None:
        super().__init__(source, root, source / KEPT / "tests")
        self.blocks: list[Block] = []
        self.source = source
        for file, text in sources(source).items():
            mark = instrumented if file.endswith(".py") else instrumented_cpp
            marked, blocks = mark(file, text, len(self.blocks))
            (self.root / file).write_text(marked)
            self.blocks += [block for block, _, _ in blocks]
        (self._beside / f"{MARKS}.py").write_text(MARKS_SOURCE.format(size=len(self.blocks)))
        (self._beside / "moe_rt_recording.py").write_text(PLUGIN)
        self._marks, self._record = self._beside / "marks", self._beside / "record"
        self._marks.write_bytes(bytes(len(self.blocks)))
        os.environ.pop(MARK_FILE, None)
        self._take_or_build(source / KEPT)

    def _take_or_build(self, kept: Path) -> None:
        """Build the marked engine, which takes minutes, once for these sources."""
        kept.mkdir(parents=True, exist_ok=True)
        cpp = {file: (self.root / file).read_bytes() for file in sources(self.source) if file.endswith(CPP)}
        engine = kept / f"engine.{hashlib.sha256(b''.join(cpp.values())).hexdigest()[:16]}.so"
        with BUILDING:
            if not engine.is_file():
                self.build_engine("")
                for old in kept.glob("engine.*"):
                    old.unlink()
                shutil.copy2(self.engine, engine)
        self._take_engine([engine])

    def record(self, test_file: str, limit_s: float = LIMIT_S) -> dict[str, tuple[float, list[Block]]]:
        """Return seconds and blocks of each test of a file."""
        self._marks.write_bytes(bytes(len(self.blocks)))
        self._record.write_text("")
        # PYTEST stops at the first failure, but every test is recorded.
        arguments = ["-p", "moe_rt_recording", "--maxfail=0", "--timeout=300", test_file]
        self.run_tests(arguments, limit_s)
        tests = {}
        for line in self._record.read_text().splitlines():
            test, seconds, seen = json.loads(line)
            marks = zlib.decompress(base64.b85decode(seen))
            tests[test] = (seconds, [block for block, mark in zip(self.blocks, marks, strict=True) if mark])
        return tests

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), MARK_FILE: str(self._marks), RECORD: str(self._record)}


@dataclass
class Executed:
    """Blocks that each test executes, from results kept in `directory`."""

    root: Path
    directory: Path
    seconds: dict[str, float] = field(default_factory=dict)
    _breadth: dict[str, Counter[str]] = field(default_factory=dict)  # of a file of tests: blocks of each source file
    _by_block: dict[Block, list[str]] = field(default_factory=lambda: defaultdict(list))
    _by_file: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _at_import: set[Block] = field(default_factory=set)

    def load(self) -> Executed:
        for kept in sorted(self.directory.glob("*.json.z")):
            result = json.loads(zlib.decompress(kept.read_bytes()))
            path = self.root / result["file"]
            if path.is_file() and kept == kept_as(self.directory, self.root, result["file"]):
                self._add(result)
        return self

    def _add(self, result: dict) -> None:
        blocks = [tuple(block) for block in result["blocks"]]
        every: set[int] = set()
        for test, (seconds, numbers) in result["tests"].items():
            every.update(numbers)
            if test == AT_IMPORT:
                self._at_import.update(blocks[number] for number in numbers)
                continue
            self.seconds[test] = seconds
            for number in numbers:
                self._by_block[blocks[number]].append(test)
                self._by_file[blocks[number][0]].add(test)
        self._breadth[result["file"]] = Counter(blocks[number][0] for number in every)

    def nearness(self, test_file: str, file: str) -> float:
        """Return how much of a source file a file of tests executes, less for whatever else it executes."""
        counts = self._breadth.get(test_file, Counter())
        return counts[file] ** 2 / max(1, counts.total())

    def lacks(self) -> list[str]:
        """Return files of tests that are not recorded."""
        return [file for file in test_files(self.root) if file not in self._breadth]

    def tests(self, file: str, function: str, place: int) -> list[str]:
        """Return tests that execute a block; for what is executed at import, tests that execute any of the file."""
        found = self._by_block.get((file, function, place))
        if not found and (not function or (file, function, place) in self._at_import):
            found = list(self._by_file.get(file, ()))
        return list(found or ())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def kept_as(directory: Path, root: Path, test_file: str) -> Path:
    name = test_file.removeprefix("tests/").replace("/", "-").removesuffix(".py")
    return directory / f"{name}.{digest(root / test_file)}.json.z"


def keep(path: Path, test_file: str, tests: dict[str, tuple[float, list[Block]]]) -> None:
    numbers: dict[Block, int] = {}
    listed = {
        test: [round(seconds, 3), [numbers.setdefault(block, len(numbers)) for block in blocks]]
        for test, (seconds, blocks) in tests.items()
    }
    result = {"file": test_file, "blocks": list(numbers), "tests": listed}
    for old in path.parent.glob(f"{path.name.split('.')[0]}.*"):
        old.unlink()
    path.write_bytes(zlib.compress(json.dumps(result).encode()))


def test_files(root: Path) -> Iterator[str]:
    """Yield files that a mutant may run: all except tests of servers and tests that compile kernels for minutes."""
    left_out = ("ptx", "serving", "serving_sglang", "docs", "install", "model", "mutants", "tree", "soak")
    for path in sorted([*(root / "tests").rglob("test_*.py"), *(root / "bench").glob("test_*.py")]):
        file = path.relative_to(root).as_posix()
        if file.split("/")[1] not in left_out or file == "tests/docs/test_pages.py":
            yield file


def collect(
    root: Path, directory: Path, files: list[str], jobs: int, limit_s: float = LIMIT_S, minutes: float = 600.0
) -> None:
    """Record the tests of files that are not kept yet."""
    directory.mkdir(parents=True, exist_ok=True)
    asked = [file for file in files if not kept_as(directory, root, file).is_file()]

    def work(part: int) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="moe_rt_executed_") as scratch,
            closing(MarkedTree(root, Path(scratch))) as tree,
        ):
            while queue and time.monotonic() < end:
                file = queue.pop(0)
                start = time.monotonic()
                tests = tree.record(file, limit_s)
                keep(kept_as(directory, root, file), file, tests)
                blocks = len({block for _, seen in tests.values() for block in seen})
                said = f"{len(tests):4} tests execute {blocks:5} blocks"
                print(f"{time.monotonic() - start:5.0f} s  {said}  {file}", flush=True)

    queue, end = asked, time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(min(jobs, len(queue)))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="files of tests; all by default")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="files at the same time")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="most for a file; tests after it stay unknown")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no file after this time")
    parser.add_argument("--root", type=Path, default=ROOT)
    asked = parser.parse_args()
    collect(
        asked.root,
        asked.root / KEPT,
        asked.files or list(test_files(asked.root)),
        asked.jobs,
        asked.seconds,
        asked.minutes,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
