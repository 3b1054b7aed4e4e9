"""Draw generated mutants at random, run the tests that execute their lines, and report which no test notices.

    python tools/sampled_mutants.py --sample 20 [--seed 7] [--folder moe_rt/group] [--changed HEAD^] [--strict]
        [--minutes 4 --log FILE]

A line is drawn uniformly from all lines that have mutants, then one of its mutants. `--changed` adds all mutants of
lines that differ from a git ref, up to `--most`. A mutant runs the tests that execute its block
(tools/executed.py), for up to `--seconds`, tests of the nearest files first. Before the last line, JSON, come a table
by folder with 95 % intervals and survivors as diffs. With --strict it exits with 1 if a mutant survives.

`--log` appends each verdict to a file and takes verdicts from it: a run that ended early goes on there. Remove a line
to judge its mutant again.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from executed import KEPT, Executed, blocks_of, sources
from generated import CPP, Change, generate
from scratch_tree import ScratchTree
from switches import CHOSEN, compiled_here, compiling, with_switches

ROOT = Path(__file__).resolve().parents[1]
HERE = "tests/mutants"
# Only `make serve-test` runs these, in a separate environment.
LEFT_OUT = ("moe_rt/integrations/vllm/", "moe_rt/integrations/sglang/", "moe_rt/lab/testing/serving/")
LEFT_OUT += ("moe_rt/lab/bench/serving/", "moe_rt/_engine.pyi", "moe_rt/lab/check/serving.py")
TEST_LIMIT, COMPILED_LIMIT = "--timeout=60", "--timeout=300"  # a C++ mutant's first test may compile its program
AS_GIVEN = {"MOE_RT_TEST_ORDER": "as given"}  # see tests/conftest.py
LEAST_LIMIT_S = 90.0  # a run of tests that lasts this long, and five times as long as usual, hangs
NOT_FOUND = 4  # pytest's exit status if no test has a given name
MOST_TESTS, FILES_AT_LEAST = 40, 3  # tests of one file, and files that share what time is left
KILLED, SURVIVED, EQUIVALENT, NO_VERDICT = "killed", "survived", "equivalent", "no_verdict"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Equivalent:
    """A change that no test can notice: every mutant of an operator on a line of a function."""

    file: str
    function: str
    operator: str
    line: str
    reason: str


def equivalents(root: Path) -> list[Equivalent]:
    """Return those listed under [[equivalent]] in the files of tests/mutants."""
    tables = [tomllib.loads(path.read_text()) for path in sorted((root / HERE).glob("*.toml"))]
    return [Equivalent(**fields) for table in tables for fields in table.get("equivalent", ())]


def universe(root: Path, folder: str) -> dict[tuple[str, int], list[Change]]:
    """Return all mutants by file and line."""
    command = ["git", "ls-files", "moe_rt", "cuda"]
    listed = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    found: dict[tuple[str, int], list[Change]] = defaultdict(list)
    can_run = compiled_here(root)
    for file in listed:
        if file.endswith(CPP) and file not in can_run:
            continue
        if file.endswith((".py", *CPP)) and file.startswith(folder) and not file.startswith(LEFT_OUT):
            for change in generate(file, (root / file).read_text()):
                found[file, change.line].append(change)
    return found


def drawn(lines: dict[tuple[str, int], list[Change]], seed: int, root: Path) -> Iterator[Change]:
    """Yield mutants of random lines, one of a line; in Python only other programs."""
    rng = random.Random(seed)
    for place in rng.sample(sorted(lines), len(lines)):
        change = rng.choice(lines[place])
        if is_program(change, (root / change.file).read_text()):
            yield change


def is_program(change: Change, text: str) -> bool:
    """False for Python that does not compile, or does the same; the compiler judges C++."""
    if change.file.endswith(CPP):
        return True
    try:
        return ast.dump(ast.parse(change.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def changed_lines(root: Path, ref: str) -> set[tuple[str, int]]:
    """Return lines that differ from a git ref; nothing if the commit does not exist."""
    git = ["git", "-C", str(root)]
    if subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], capture_output=True).returncode:
        print(f"there is no {ref} here: nothing is taken for changed")
        return set()
    diff = subprocess.run([*git, "diff", "-U0", "--no-color", ref], check=True, stdout=subprocess.PIPE, text=True)
    lines, file = set(), ""
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            file = line[4:].removeprefix("b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines |= {(file, number) for number in range(first, first + count)}
    return lines


@dataclass
class Judge:
    """Decides on mutants, in scratch trees that run at the same time."""

    root: Path
    executed: Executed
    seconds: float
    fails_anyway: set[str] = field(default_factory=set)
    passes_without: set[str] = field(default_factory=set)

    def tests_of(self, change: Change) -> list[str]:
        """Return tests that execute a change, in the order in which they run.

        Files come first that execute much of the changed source file and little else; of a file, the shortest tests.
        """
        text = (self.root / change.file).read_text()
        around = [(last - first, block) for block, first, last in blocks_of(change.file, text)
                  if first <= change.line <= last]  # fmt: skip
        _, block = min(around, default=(0, (change.file, "", 0)))
        found = self.executed.tests(*block)
        if not found:
            found = mentioning(self.root, change, self.executed.lacks())
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self._seconds):
            by_file[test.split("::")[0]].append(test)
        chosen, left = [], self.seconds
        for file in sorted(by_file, key=lambda file: (-self.executed.nearness(file, change.file), file)):
            share = left / FILES_AT_LEAST if chosen else self.seconds / 2
            for number, test in enumerate(by_file[file][:MOST_TESTS]):
                share -= self._seconds(test)
                if share < 0 and (number or left < self._seconds(test)):
                    break
                chosen.append(test)
                left -= self._seconds(test)
        return chosen

    def _seconds(self, test: str) -> float:
        return self.executed.seconds.get(test, 5.0 if "::" in test else self.seconds / FILES_AT_LEAST)

    def judge(self, tree: ScratchTree, change: Change, number: int) -> tuple[str, str]:
        """Return the verdict on a mutant, and what led to it."""
        chosen = self.tests_of(change)
        if not chosen:
            return SURVIVED, "no test executes it"
        while tests := [test for test in chosen if test not in self.fails_anyway]:
            status, output = self._run(tree, tests, change, number)
            renamed = status == NOT_FOUND  # names of cases may hold what the mutant changes
            if renamed:
                files = dict.fromkeys(test.split("::")[0] for test in tests)
                tests = [file for file in files if file not in self.fails_anyway]
                if not tests:
                    break
                status, output = self._run(tree, tests, change, number)
            if status == 0:
                return SURVIVED, f"{len(tests)} tests of {len({t.split('::')[0] for t in tests})} files passed"
            failed = next(iter(FAILED.findall(output)), "")
            file = failed.split("::")[0]
            failed = file if renamed and file in tests else failed
            asked = failed in tests or file in tests
            # A hang is compared with all tests, which may take as long on a busy machine.
            if self._pass_without(tree, [failed] if asked else tests if status is None else tests[:1]):
                return KILLED, failed or ("it hangs" if status is None else f"pytest ended with {status}")
            if not failed:
                break
        return NO_VERDICT, f"{chosen[0].split('::')[0]} also fails without it"

    def _run(self, tree: ScratchTree, tests: list[str], change: Change, number: int) -> tuple[int | None, str]:
        limit = max(LEAST_LIMIT_S, 5 * sum(map(self._seconds, tests)))
        left_out = [f"--deselect={test}" for test in self.fails_anyway if test.split("::")[0] in tests]
        if change.file.endswith(CPP):
            limit += LEAST_LIMIT_S
            return tree.run_tests([COMPILED_LIMIT, *left_out, *tests], limit, **AS_GIVEN, **{CHOSEN: str(number)})
        with tree.changed({change.file: change.apply((tree.root / change.file).read_text())}):
            return tree.run_tests([TEST_LIMIT, *left_out, *tests], limit, **AS_GIVEN)

    def _pass_without(self, tree: ScratchTree, tests: list[str]) -> bool:
        """True if tests pass without a mutant: one that always fails proves nothing."""
        if self.passes_without.issuperset(tests):
            return True
        status, _ = tree.run_tests([TEST_LIMIT, *tests], LEAST_LIMIT_S + 5 * sum(map(self._seconds, tests)))
        if status == 0:
            self.passes_without.update(tests)
        elif len(tests) == 1:
            self.fails_anyway.update(tests)
        return status == 0


def mentioning(root: Path, change: Change, files: Iterable[str]) -> list[str]:
    """Return those of `files` that name a changed function or its module most often, for want of a record."""
    words = {Path(change.file).stem, *change.function.split(".")} - {"", "__init__"}
    counted = {file: (root / file).read_text() for file in files}
    counts = {file: sum(len(re.findall(rf"\b{re.escape(w)}\b", text)) for w in words) for file, text in counted.items()}
    return sorted((file for file in counts if counts[file]), key=lambda file: -counts[file])[:3]


def folder_of(file: str) -> str:
    parts = file.split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] == ["lab"] else 2])


def interval(hits: int, of: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a share."""
    if not of:
        return 0.0, 1.0
    z, share = 1.96, hits / of
    middle = share + z * z / (2 * of)
    spread = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def table(results: list[tuple[Change, str]]) -> str:
    """Return counts by folder, and the share killed of all that can be noticed."""
    counts = Counter((folder, verdict) for change, verdict in results for folder in (folder_of(change.file), "all"))
    folders = sorted({folder for folder, _ in counts} - {"all"})
    width = max(map(len, [*folders, "folder"]))
    lines = [f"{'folder':{width}}  killed  survived  equivalent  no verdict  score  95 % interval"]
    for folder in (*folders, "all"):
        killed, survived, same, none = (counts[folder, v] for v in (KILLED, SURVIVED, EQUIVALENT, NO_VERDICT))
        low, high = interval(killed, killed + survived)
        score = f"{killed / (killed + survived):.0%}" if killed + survived else "-"
        lines.append(
            f"{folder:{width}}  {killed:6}  {survived:8}  {same:10}  {none:10}  {score:>5}  {low:.0%} to {high:.0%}"
        )
    return "\n".join(lines)


def diff(change: Change, root: Path) -> str:
    before = (root / change.file).read_text()
    lines = (text.splitlines(keepends=True) for text in (before, change.apply(before)))
    return "".join(difflib.unified_diff(*lines, f"a/{change.file}", f"b/{change.file}", n=2))


def choose(asked: argparse.Namespace) -> list[Change]:
    """Return the mutants to judge; those of C++ that do not compile are replaced by others."""
    lines = universe(asked.root, asked.folder)
    chosen: list[Change] = []
    if asked.changed:
        here = [change for place in sorted(changed_lines(asked.root, asked.changed)) for change in lines.get(place, ())]
        valid = [change for change in here if is_program(change, (asked.root / change.file).read_text())]
        chosen = compiling(random.Random(asked.seed).sample(valid, min(asked.most, len(valid))), asked.root)
    more, wanted = drawn(lines, asked.seed, asked.root), len(chosen) + asked.sample
    while len(chosen) < wanted:
        some = [change for change, _ in zip(more, range(wanted - len(chosen)), strict=False)]
        if not some:
            break
        chosen += [change for change in compiling(some, asked.root) if change not in chosen]
    return chosen


class Trees:
    """Scratch trees of the chosen mutants, one for each worker.

    The engine of C++ mutants is built when the first of them is judged, and kept: the same seed is drawn again once a
    test has been written.
    """

    def __init__(self, chosen: list[Change], asked: argparse.Namespace, opened: ExitStack) -> None:
        self._texts = with_switches(chosen, asked.root)
        self._asked, self._opened = asked, opened
        self._building = threading.Lock()

    def make(self) -> ScratchTree:
        """Return a tree with the unchanged engine, which suffices for mutants of Python."""
        scratch = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="moe_rt_mutants_"))
        tree = ScratchTree(self._asked.root, Path(scratch), self._asked.root / "build/mutants/tests")
        self._opened.enter_context(closing(tree)).take_engine()
        return tree

    def add_switches(self, tree: ScratchTree) -> None:
        """Give a tree the C++ sources with a switch for each mutant, and their engine."""
        for file, text in self._texts.items():
            (tree.root / file).write_text(text)
        unchanged = {file: text for file, text in sources(self._asked.root).items() if file.endswith(CPP)}
        digest = hashlib.sha256(json.dumps({**unchanged, **self._texts}).encode()).hexdigest()[:16]
        kept = self._asked.root / f"build/mutants/engine.{digest}.so"
        with self._building:
            if not kept.is_file():
                tree.build_engine("")
                for old in kept.parent.glob("engine.*"):
                    old.unlink()
                shutil.copy2(tree.engine, kept)
            tree.take_engine_from(kept)


def identity(change: Change) -> tuple[str, int, str, str, str]:
    return change.file, change.line, change.operator, change.find, change.replace


def logged(path: Path | None) -> dict[tuple[str, int, str, str, str], tuple[str, str]]:
    """Return verdicts of a log, each with what led to it."""
    if path is None or not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line[0], line[1], line[2], line[3], line[4]): (line[5], line[6]) for line in lines}


def run(chosen: list[Change], asked: argparse.Namespace) -> list[tuple[Change, str, str]]:
    """Return each mutant with its verdict and what led to it, in the order in which they ended.

    The last worker begins with mutants of C++, whose engine takes minutes to build, and the others with Python.
    """
    end = time.monotonic() + 60 * asked.minutes
    judge = Judge(asked.root, Executed(asked.root, asked.root / KEPT).load(), asked.seconds)
    listed = {(e.file, e.function, e.operator, e.line) for e in equivalents(asked.root)}
    results: list[tuple[Change, str, str]] = []
    lock = threading.Lock()
    queues: dict[bool, list[tuple[int, Change]]] = {False: [], True: []}
    known = logged(asked.log)
    for number, change in enumerate(chosen):
        text = (asked.root / change.file).read_text().splitlines()[change.line - 1].strip()
        if (change.file, change.function, change.operator, text) in listed:
            results.append((change, EQUIVALENT, "listed"))
        elif identity(change) in known:
            results.append((change, *known[identity(change)]))
        else:
            queues[change.file.endswith(CPP)].append((number, change))

    def take(cpp: bool) -> tuple[int, Change] | None:
        with lock:
            return queues[cpp].pop(0) if queues[cpp] and time.monotonic() < end else None

    def work(trees: Trees, last: bool) -> None:
        tree, has_switches = trees.make(), False
        for cpp in (True, False) if last and asked.jobs > 1 else (False, True):
            while given := take(cpp):
                start = time.monotonic()
                if cpp and not has_switches:
                    trees.add_switches(tree)
                    has_switches = True
                number, change = given
                verdict, why = judge.judge(tree, change, number)
                with lock:
                    results.append((change, verdict, why))
                    if asked.log:
                        with asked.log.open("a") as log:
                            log.write(json.dumps([*identity(change), verdict, why]) + "\n")
                    place = f"{change.file}:{change.line}"
                    print(
                        f"{time.monotonic() - start:5.0f} s  {verdict:10}  {place}  {change.operator}  {why}",
                        flush=True,
                    )

    with ExitStack() as opened:
        trees = Trees(chosen, asked, opened)
        count = min(asked.jobs, sum(map(len, queues.values())))
        with ThreadPoolExecutor(max(1, count)) as pool:
            list(pool.map(lambda number: work(trees, number == count - 1), range(count)))
    return results + [(change, NO_VERDICT, "the time was up") for queue in queues.values() for _, change in queue]


def main(report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="mutants to draw")
    parser.add_argument("--seed", type=int, default=None, help="random by default; the last line has it")
    parser.add_argument("--folder", default="", help="begin of the paths of files, such as moe_rt/group")
    parser.add_argument("--changed", metavar="REF", help="also mutants of lines that differ from a git ref")
    parser.add_argument("--most", type=int, default=20, help="mutants of changed lines")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for one mutant")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no mutant after this time")
    parser.add_argument("--log", type=Path, metavar="FILE", help="of verdicts, which are not judged again")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="mutants at the same time")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a mutant survives")
    parser.add_argument("--root", type=Path, default=ROOT)
    asked = parser.parse_args()
    asked.seed = random.randrange(1 << 31) if asked.seed is None else asked.seed
    chosen = choose(asked)
    report(f"{len(chosen)} mutants, seed {asked.seed}")
    results = run(chosen, asked) if chosen else []
    report("\n" + table([(change, verdict) for change, verdict, _ in results]))
    for change, verdict, why in sorted(results, key=lambda result: (result[0].file, result[0].line)):
        if verdict in (SURVIVED, NO_VERDICT):
            report(f"\n{verdict}: {change.function or 'module'}, {change.operator}: {why}\n{diff(change, asked.root)}")
    counts = Counter(verdict for _, verdict, _ in results)
    names = (KILLED, SURVIVED, EQUIVALENT, NO_VERDICT)
    report(json.dumps({"seed": asked.seed, "sampled": len(results), **{name: counts[name] for name in names}}))
    return int(asked.strict and counts[SURVIVED] > 0)


if __name__ == "__main__":
    sys.exit(main())
