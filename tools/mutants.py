"""Run tests under small wrong changes of the sources, the mutants of tests/mutants, and report which no test notices.

    python tools/mutants.py [--only NAME ...] [--changed REF] [--share I/N] [--minutes M]

A file there has the mutants of one folder, a table each: the text `find`, which occurs once in `function` of `file`,
becomes `replace`, and one of `tests` must fail. Without `function` the text occurs once in the file. All happens in a
scratch copy of the tracked files. With `kind`, "expression" or "statement", the text is of the CPU engine: all such
mutants are compiled into one engine, and an environment variable switches one of them on. A mutant with `survives` is
not run: that is the reason why no test can fail. Exits with 1 if a mutant survives, with 2 if one could not be judged:
its tests also fail without it, end without a verdict, or do not exist.
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

from functions import find_once
from scratch_tree import ScratchTree

ROOT = Path(__file__).resolve().parents[1]
HERE = "tests/mutants"
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

NOT_COMPILED = "NotCompiled"  # what tests/support/cpp_programs.py raises

KILLED, SURVIVED = "killed", "SURVIVED"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One table of a file of tests/mutants, which is `group`; its fields are those of the table."""

    name: str
    group: str
    says: str
    file: str
    find: str
    replace: str
    function: str = ""
    tests: tuple[str, ...] = ()
    kind: str = ""
    survives: str = ""

    @property
    def switched(self) -> str:
        """Code that replaces `find` in the engine's source."""
        return SWITCH[self.kind].format(name=self.name, find=self.find, replace=self.replace)


def read(root: Path) -> list[Mutant]:
    """Return all mutants, by file and name."""
    paths = sorted((root / HERE).glob("*.toml"))
    mutants = [mutant for path in paths for mutant in parse(path.stem, path.read_text())]
    twice = [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    if twice:
        refuse(f"two mutants have the name {', '.join(twice)}")
    return mutants


def parse(group: str, text: str) -> list[Mutant]:
    tables = tomllib.loads(text)
    tables.pop("equivalent", None)  # of generated mutants, see tools/sampled_mutants.py
    return [as_mutant(group, name, fields) for name, fields in sorted(tables.items())]


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(2)


def as_mutant(group: str, name: str, fields: dict[str, object]) -> Mutant:
    fields = {"name": name, "group": group, **fields, "tests": tuple(fields.get("tests", ()))}  # type: ignore[arg-type]
    try:
        mutant = Mutant(**fields)  # type: ignore[arg-type]
    except TypeError as error:
        refuse(f"{HERE}/{group}.toml, {name}: {error}")
    if mutant.kind not in ("", *SWITCH) or bool(mutant.tests) == bool(mutant.survives):
        refuse(f"{HERE}/{group}.toml, {name}: wrong kind, or not one of tests and survives")
    return mutant


def with_replaced(text: str, mutants: Sequence[Mutant]) -> str:
    """Return the text of a file with each mutant's `find` replaced, by a switch if it has a kind."""
    places = []
    for mutant in mutants:
        try:
            places.append((find_once(mutant.file, text, mutant.function, mutant.find), mutant))
        except ValueError as error:
            refuse(f"{mutant.name}: {error}")
    parts, at = [], 0
    for place, mutant in sorted(places, key=lambda placed: placed[0]):
        if place < at:
            refuse(f"{mutant.name}: its text overlaps with that of another mutant of {mutant.file}")
        parts += [text[at:place], mutant.switched if mutant.kind else mutant.replace]
        at = place + len(mutant.find)
    return "".join((*parts, text[at:]))


def touched(root: Path, ref: str) -> tuple[set[str], list[Mutant]]:
    """Return files that differ from a git ref, and its mutants; nothing if no such commit exists (clone of depth 1)."""
    git = ["git", "-C", str(root)]
    if subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], capture_output=True).returncode:
        print(f"there is no {ref} here: nothing is taken for changed")
        return set(), read(root)
    listed = subprocess.run([*git, "diff", "--name-only", ref], check=True, stdout=subprocess.PIPE, text=True)
    before = [
        mutant for path in sorted((root / HERE).glob("*.toml")) for mutant in parse(path.stem, at_ref(git, ref, path))
    ]
    return set(listed.stdout.splitlines()), before


def at_ref(git: list[str], ref: str, path: Path) -> str:
    """Return the text of a mutant file at a git ref, empty if it did not exist."""
    shown = subprocess.run([*git, "show", f"{ref}:{HERE}/{path.name}"], capture_output=True, text=True)
    return "" if shown.returncode else shown.stdout


def in_share(name: str, share: str) -> bool:
    part, parts = map(int, share.split("/"))
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % parts == part % parts


def choose(mutants: list[Mutant], asked: argparse.Namespace) -> list[Mutant]:
    """Mutants selected by any of the options, those of changed files first; without options all."""
    if asked.only:
        unknown = set(asked.only) - {mutant.name for mutant in mutants}
        if unknown:
            refuse(f"there is no mutant {', '.join(sorted(unknown))}")
        return [mutant for mutant in mutants if mutant.name in asked.only]
    if not asked.changed and not asked.share:
        return mutants
    files, before = touched(asked.root, asked.changed) if asked.changed else (set(), mutants)
    first = [mutant for mutant in mutants if mutant.file in files or mutant not in before]
    shared = [mutant for mutant in mutants if asked.share and in_share(mutant.name, asked.share)]
    return first + [mutant for mutant in shared if mutant not in first]


def judge(tree: ScratchTree, mutant: Mutant) -> tuple[str, str]:
    """Return the verdict on a mutant, and pytest's output."""
    if mutant.kind:
        status, output = tree.run_tests([TEST_LIMIT, *mutant.tests], LIMIT_S, **{CHOSEN: mutant.name})
    else:
        text = with_replaced((tree.root / mutant.file).read_text(), [mutant])
        with tree.changed({mutant.file: text}):
            status, output = tree.run_tests([TEST_LIMIT, *mutant.tests], LIMIT_S)
    # Only failed tests are a verdict. pytest has other statuses for tests that it cannot import or find.
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
    """True if these mutants' tests passed in time without a mutant; a test that always fails proves nothing."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        return False
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    status, output = tree.run_tests(tests, seconds)
    if status:
        refuse(f"{output}\nthe tests do not pass without a mutant: pytest ended with {status}")
    return status is not None


def run(mutants: list[Mutant], root: Path, minutes: float) -> dict[str, str]:
    """Return the verdict on each mutant that was run, by name."""
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
                shown = failed[0][:150] if failed else mutant.says
                print(f"{seconds:5.0f} s  {mutant.name}: {results[mutant.name]}  {shown}", flush=True)
                if results[mutant.name] not in (KILLED, SURVIVED):
                    print("\n".join(output.splitlines()[-20:]))
    return results


def summary(mutants: list[Mutant], results: dict[str, str]) -> str:
    """Return the score by file of mutants, and each mutant that was not killed."""
    groups = sorted({mutant.group for mutant in mutants})
    width = max(map(len, [*groups, "folder"]))
    lines = ["", f"{'folder':{width}} mutants  killed  survived  not visible  score"]
    visible = [mutant for mutant in mutants if mutant.name in results]
    judged = Counter((mutant.group, results[mutant.name]) for mutant in visible)
    listed = Counter(mutant.group for mutant in mutants if mutant.survives)
    for group in (*groups, "all"):
        some = groups if group == "all" else [group]
        killed, survived = (sum(judged[g, result] for g in some) for result in (KILLED, SURVIVED))
        unseen, every = sum(listed[g] for g in some), sum(m.group in some for m in mutants)
        ran = sum(m.group in some for m in visible)
        if every:
            score = f"{killed / ran:.0%}" if ran else "-"
            lines.append(f"{group:{width}} {every:7}  {killed:6}  {survived:8}  {unseen:11}  {score:>5}")
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
