"""Runs tests under small wrong changes of the sources, the mutants of tests/mutants, and says which no test notices.

    python tools/mutants.py [--only NAME ...] [--changed REF] [--share I/N] [--minutes M]

Each file there is one mutant: the text `find`, which stands once in `file`, becomes `replace`, and one of `tests` must
fail. All happens in a scratch copy of the tracked files. With `kind`, "expression" or "statement", the text is of the
CPU engine: all such mutants are compiled into one engine, and an environment variable switches one of them on. A mutant
with `survives` is not run: that is the reason why no test can fail. Exits with 1 if a mutant survives, with 2 if one
could not be judged: its tests fail without it, too, end without a verdict, or are not there.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from scratch_tree import ScratchTree

ROOT = Path(__file__).resolve().parents[1]
HERE = "tests/mutants"
AREAS = (
    *("Python", "Bench", "Engine", "Checks", "Orders", "Device", "Launcher"),
    *("Errors", "Timeouts", "Cleanup", "Security", "Tools", "Docs"),
)
SWITCH = {
    "expression": '(moe_rt_mutant("{name}") ? ({replace}) : ({find}))',
    "statement": 'if (moe_rt_mutant("{name}")) {{ {replace} }} else {{ {find} }}',
}
CHOSEN = "MOE_RT_MUTANT"  # names the engine's mutant of a run
HEADER = f"""#include <cstdlib>
#include <cstring>
inline bool moe_rt_mutant(const char* name) {{
  static const char* const chosen = std::getenv("{CHOSEN}");
  return chosen && std::strcmp(chosen, name) == 0;
}}
"""
LIMIT_S = 300.0  # for the tests of one mutant; pytest fails a test that hangs before that
TEST_LIMIT = "--timeout=120"
AT_ONCE = 10  # mutants whose tests are first run together without any

NOT_COMPILED = "NotCompiled"  # what tests/compiled.py raises

KILLED, SURVIVED = "killed", "SURVIVED"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One file of tests/mutants; its fields are those of the file, and `name` is its name."""

    name: str
    area: str
    says: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...] = ()
    kind: str = ""
    survives: str = ""

    @property
    def switched(self) -> str:
        """What stands in the engine's source in place of `find`."""
        return SWITCH[self.kind].format(name=self.name, find=self.find, replace=self.replace)


def read(root: Path) -> list[Mutant]:
    """All mutants, by name."""
    paths = sorted((root / HERE).glob("*.toml"))
    return [as_mutant(path.stem, tomllib.loads(path.read_text())) for path in paths]


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(2)


def as_mutant(name: str, fields: dict[str, object]) -> Mutant:
    try:
        mutant = Mutant(**{"name": name, **fields, "tests": tuple(fields.get("tests", ()))})  # type: ignore[arg-type]
    except TypeError as error:
        refuse(f"{HERE}/{name}.toml: {error}")
    if mutant.area not in AREAS or mutant.kind not in ("", *SWITCH) or bool(mutant.tests) == bool(mutant.survives):
        refuse(f"{HERE}/{name}.toml: wrong area or kind, or not one of tests and survives")
    return mutant


def with_replaced(text: str, mutants: Sequence[Mutant]) -> str:
    """The text of a file with each mutant's `find` replaced, by a switch if it has a kind."""
    for mutant in mutants:
        if text.count(mutant.find) != 1:
            refuse(f"{mutant.name}: its text is {text.count(mutant.find)} times in {mutant.file}, expected once")
    places = sorted((text.index(mutant.find), mutant) for mutant in mutants)
    parts, at = [], 0
    for place, mutant in places:
        if place < at:
            refuse(f"{mutant.name}: its text overlaps with that of another mutant of {mutant.file}")
        parts += [text[at:place], mutant.switched if mutant.kind else mutant.replace]
        at = place + len(mutant.find)
    return "".join((*parts, text[at:]))


def touched(root: Path, ref: str) -> set[str]:
    """Files that differ from a git ref; none where there is no such commit, as in a clone of depth 1."""
    git = ["git", "-C", str(root)]
    if subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], capture_output=True).returncode:
        print(f"there is no {ref} here: nothing is taken for changed")
        return set()
    listed = subprocess.run([*git, "diff", "--name-only", ref], check=True, stdout=subprocess.PIPE, text=True)
    return set(listed.stdout.splitlines())


def in_share(name: str, share: str) -> bool:
    part, parts = map(int, share.split("/"))
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % parts == part % parts


def choose(mutants: list[Mutant], asked: argparse.Namespace) -> list[Mutant]:
    """Those that any of the options names, first those of changed files; without options all."""
    if asked.only:
        unknown = set(asked.only) - {mutant.name for mutant in mutants}
        if unknown:
            refuse(f"there is no mutant {', '.join(sorted(unknown))}")
        return [mutant for mutant in mutants if mutant.name in asked.only]
    if not asked.changed and not asked.share:
        return mutants
    differ = touched(asked.root, asked.changed) if asked.changed else set()
    first = [mutant for mutant in mutants if {mutant.file, f"{HERE}/{mutant.name}.toml"} & differ]
    shared = [mutant for mutant in mutants if asked.share and in_share(mutant.name, asked.share)]
    return first + [mutant for mutant in shared if mutant not in first]


def judge(tree: ScratchTree, mutant: Mutant) -> tuple[str, str]:
    """What became of it, and what pytest printed."""
    if mutant.kind:
        status, output = tree.run_tests([TEST_LIMIT, *mutant.tests], LIMIT_S, **{CHOSEN: mutant.name})
    else:
        text = with_replaced((tree.root / mutant.file).read_text(), [mutant])
        with tree.changed({mutant.file: text}):
            status, output = tree.run_tests([TEST_LIMIT, *mutant.tests], LIMIT_S)
    # Only failed tests are a verdict: pytest has other statuses for tests that it could not import or find.
    if status == 1 and NOT_COMPILED in output:
        return "no verdict: it does not compile", output
    verdicts = {0: SURVIVED, 1: KILLED, None: "took too long"}
    return verdicts.get(status, f"no verdict: pytest ended with {status}"), output


def make_engine(tree: ScratchTree, mutants: list[Mutant]) -> None:
    switched = [mutant for mutant in mutants if mutant.kind]
    if not switched:
        tree.take_engine()
        return
    texts = {
        file: with_replaced((tree.root / file).read_text(), [m for m in switched if m.file == file])
        for file in {mutant.file for mutant in switched}
    }
    with tree.changed(texts):
        tree.build_engine(HEADER)


def pass_without(tree: ScratchTree, mutants: list[Mutant], end: float) -> bool:
    """Whether there was time to see that the tests of these mutants pass, for one that fails anyway proves nothing."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        return False
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    status, output = tree.run_tests(tests, seconds)
    if status:
        refuse(f"{output}\nthe tests do not pass without a mutant: pytest ended with {status}")
    return status is not None


def run(mutants: list[Mutant], root: Path, minutes: float) -> dict[str, str]:
    """What became of each that was run, by name."""
    end = time.monotonic() + 60 * minutes
    results: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="moe_rt_mutants_") as scratch,
        closing(ScratchTree(root, Path(scratch))) as tree,
    ):
        make_engine(tree, mutants)
        for first in range(0, len(mutants), AT_ONCE):
            some = mutants[first : first + AT_ONCE]
            if not pass_without(tree, some, end):
                return results
            for mutant in some:
                if time.monotonic() > end:
                    return results
                start = time.monotonic()
                results[mutant.name], output = judge(tree, mutant)
                seconds = time.monotonic() - start
                failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                told = failed[0][:150] if failed else mutant.says
                print(f"{seconds:5.0f} s  {mutant.name}: {results[mutant.name]}  {told}", flush=True)
                if results[mutant.name] not in (KILLED, SURVIVED):
                    print("\n".join(output.splitlines()[-20:]))
    return results


def summary(mutants: list[Mutant], results: dict[str, str]) -> str:
    """The score by area, and each mutant that was not killed."""
    lines = ["", f"{'area':10} mutants  killed  survived  not visible  score"]
    visible = [mutant for mutant in mutants if mutant.name in results]
    judged = Counter((mutant.area, results[mutant.name]) for mutant in visible)
    listed = Counter(mutant.area for mutant in mutants if mutant.survives)
    for area in (*AREAS, "all"):
        areas = AREAS if area == "all" else [area]
        killed, survived = (sum(judged[a, result] for a in areas) for result in (KILLED, SURVIVED))
        unseen, every = sum(listed[a] for a in areas), sum(m.area in areas for m in mutants)
        ran = sum(m.area in areas for m in visible)
        if every:
            score = f"{killed / ran:.0%}" if ran else "-"
            lines.append(f"{area:10} {every:7}  {killed:6}  {survived:8}  {unseen:11}  {score:>5}")
    for mutant in mutants:
        result = results.get(mutant.name, KILLED)
        if result != KILLED:
            lines.append(f"{mutant.name} ({mutant.file}) {result}: {mutant.says}")
        if mutant.survives:
            lines.append(f"{mutant.name} ({mutant.file}) is not visible: {mutant.says} {mutant.survives}")
    not_run = sum(mutant.name not in results and not mutant.survives for mutant in mutants)
    return "\n".join([*lines, *([f"{not_run} were not run: the time was up"] if not_run else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--changed", metavar="REF", help="mutants of files that differ from a git ref")
    parser.add_argument("--share", metavar="I/N", help="the I-th of N parts, as well as --changed")
    parser.add_argument("--minutes", type=float, default=600.0, help="start none after this time")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose mutants are run")
    asked = parser.parse_args()
    mutants = choose(read(asked.root), asked)
    can_run = [mutant for mutant in mutants if not mutant.survives]
    results = run(can_run, asked.root, asked.minutes) if can_run else {}
    print(summary(mutants, results))
    if set(results.values()) - {KILLED, SURVIVED}:
        return 2
    return int(SURVIVED in results.values())


if __name__ == "__main__":
    sys.exit(main())
