"""Every mutant fits the sources and names tests that exist; tools/mutants.py reports kills, survivors and the rest."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.test_named_tests import find_tests

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import mutants as tool  # noqa: E402
from functions import find_once, named_functions  # noqa: E402

MUTANTS = tool.read(ROOT)


def problems_of(mutant: tool.Mutant) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name):
        yield "its name has something else than words"
    if not mutant.says.endswith("."):
        yield f"no sentence: {mutant.says}"
    if mutant.find == mutant.replace:
        yield "it changes nothing"
    try:
        find_once(mutant.file, source(mutant.file), mutant.function, mutant.find)
    except ValueError as error:
        yield str(error)
    for test in mutant.tests:
        file, *name = test.split("::")
        if not (ROOT / file).is_file() or (name and "::".join(name).split("[")[0] not in names_of(file)):
            yield f"no such test: {test}"
        if re.search(r":\d+\]$", test):
            yield f"{test} has the number of a line, which changes"


@functools.cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@functools.cache
def names_of(file: str) -> set[str]:
    return set(find_tests(ROOT / file))


def test_all_fit_the_sources() -> None:
    assert [f"{mutant.name}: {problem}" for mutant in MUTANTS for problem in problems_of(mutant)] == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(name="Two words"), "its name has something else than words"),
        (dict(says="It adds"), "no sentence: It adds"),
        (dict(find="not there at all"), "its text occurs 0 times in tools/mutants.py, expected once"),
        (dict(find="mutant"), "times in tools/mutants.py, expected once"),
        (dict(function="gone"), "its text occurs 0 times in gone of tools/mutants.py, expected once"),
        (dict(replace="def read("), "it changes nothing"),
        (dict(tests=("tests/mutants/test_mutants_tool.py::test_gone",)), "no such test: "),
        (dict(tests=("tests/gone.py",)), "no such test: tests/gone.py"),
        (dict(tests=("tests/docs/test_docs.py::test_block[README.md:77]",)), "has the number of a line, which changes"),
    ],
)
def test_one_that_does_not_fit(changes: dict[str, Any], problem: str) -> None:
    fits = tool.as_mutant(
        "tools",
        "fits",
        dict(
            says="It reads nothing.",
            file="tools/mutants.py",
            find="def read(",
            replace="def reads(",
            tests=["tests/mutants/test_mutants_tool.py::test_all_fit_the_sources"],
        ),
    )
    assert list(problems_of(fits)) == []
    (found,) = problems_of(dataclasses.replace(fits, **changes))
    assert problem in found


def test_functions_are_found_by_name() -> None:
    python = (
        "class A:\n    @property\n    def f(self):\n        def g():\n            x\n        y\n\ndef f():\n    x\n"
    )
    spans = {name: python[first:end] for name, first, end in named_functions("a.py", python)}
    assert set(spans) == {"A.f", "A.f.g", "f"}
    assert spans["A.f"].startswith("    @property")
    assert spans["A.f"].endswith("y\n")
    cpp = "template <class T>\nvoid A<T>::f(T t) {\n  g(t);\n}\nstruct B {\n  B(int n) : n{n} {\n    f(n);\n  }\n};\n"
    assert {name for name, _, _ in named_functions("a.h", cpp)} == {"f", "B"}


def test_a_text_may_be_elsewhere_in_its_file() -> None:
    text = "def f():\n    return 1\n\n\ndef g():\n    return 1\n"
    assert find_once("a.py", text, "g", "return 1") == text.rindex("return 1")
    with pytest.raises(ValueError, match=r"occurs 2 times in a\.py"):
        find_once("a.py", text, "", "return 1")


def test_each_is_another_change() -> None:
    changes = Counter((m.file, m.find, m.replace) for m in MUTANTS)
    assert [change for change, count in changes.items() if count > 1] == []


def test_switches_of_the_engine_fit_together() -> None:
    """Switches of all mutants compile into one build of the engine."""
    switched = [m for m in MUTANTS if m.kind]
    for file in {m.file for m in switched}:
        assert file.startswith(("cuda/cpu/", "cuda/net/", "cuda/python/", "cuda/protocol/")), file
        here = [m for m in switched if m.file == file]
        text = tool.with_replaced((ROOT / file).read_text(), here)
        assert all(f'moe_rt_mutant("{m.name}")' in text for m in here)


def test_no_change_of_the_engine_lacks_its_switch() -> None:
    """Tests of the conformance suite run the engine as it was built: they would not see a changed source."""
    without = [m for m in MUTANTS if m.file.startswith("cuda/") and not m.kind]
    assert [m.name for m in without if any(t.startswith("tests/conformance/") for t in m.tests)] == []


def test_a_switch_keeps_both() -> None:
    fields = dict(says="It adds.", file="a.h", find="a - b", replace="a + b", tests=["tests/test_a.py"])
    expression = tool.as_mutant("cuda.host", "adds", {**fields, "kind": "expression"})
    assert tool.with_replaced("f(a - b);", [expression]) == 'f((moe_rt_mutant("adds") ? (a + b) : (a - b)));'
    statement = tool.as_mutant("cuda.host", "runs", {**fields, "find": "g();", "replace": "h();", "kind": "statement"})
    assert tool.with_replaced("g();", [statement]) == 'if (moe_rt_mutant("runs")) { h(); } else { g(); }'
    with pytest.raises(SystemExit):
        tool.with_replaced("a - b; a - b;", [expression])
    overlapping = tool.as_mutant("cuda.host", "overlaps", {**fields, "find": "- b", "kind": "expression"})
    with pytest.raises(SystemExit):
        tool.with_replaced("f(a - b);", [expression, overlapping])


SOURCE = "def double(x: int) -> int:\n    unused = 1\n    return 2 * x\n"
TESTS = "from moe_rt.sums import double\n\n\ndef test_double() -> None:\n    assert double(2) == 4\n"
TEXTS = {
    "killed": ("2 * x", "3 * x", 'tests = ["tests/test_sums.py::test_double"]'),
    "survivor": ("unused = 1", "unused = 2", 'tests = ["tests/test_sums.py"]'),
    "not-collected": ("def double", "def half", 'tests = ["tests/test_sums.py"]'),
    "invisible": ("unused = 1", "unused = 3", 'survives = "No code reads it."'),
}


def toml(name: str, find: str, replace: str, rest: str, file: str = "moe_rt/sums.py") -> str:
    fields = dict(says="Something.", file=file, find=find, replace=replace)
    return f"[{name}]\n" + "".join(f'{field} = "{value}"\n' for field, value in fields.items()) + rest + "\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small tree with a module, its test and four mutants."""
    files = {"moe_rt/__init__.py": "", "moe_rt/sums.py": SOURCE, "tests/test_sums.py": TESTS}
    files["tests/mutants/moe_rt.toml"] = "".join(toml(name, *texts) for name, texts in TEXTS.items())
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "-q", "-m", "a")


def run(tree: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools/mutants.py"), "--root", str(tree), *arguments]
    # Installed plug-ins take longer to load than these tests to run.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_kills_survivors_and_what_is_no_verdict(tree: Path) -> None:
    status, said = run(tree)
    assert status == 2, said
    assert re.search(r"^ +\d+ s  killed: killed  FAILED tests/test_sums.py::test_double", said, re.MULTILINE)
    assert "survivor (moe_rt/sums.py) SURVIVED: Something." in said
    assert "not-collected (moe_rt/sums.py) no verdict: pytest ended with 2: Something." in said
    assert "invisible (moe_rt/sums.py) is not visible: Something. No code reads it." in said
    assert re.search(r"^all +4 +1 +1 +1 +33%$", said, re.MULTILINE)
    assert (tree / "moe_rt/sums.py").read_text() == SOURCE, "it is the copy that is changed"


def test_what_does_not_compile_is_no_verdict(tree: Path) -> None:
    (tree / "tests/support").mkdir()
    (tree / "tests/support/cpp_programs.py").write_text((ROOT / "tests/support/cpp_programs.py").read_text())
    (tree / "tests/test_double.py").write_text(
        "from pathlib import Path\n\nfrom support.cpp_programs import compile_object\n\n\n"
        'def test_compiles() -> None:\n    compile_object(Path(__file__).with_name("double.cpp"))\n'
    )
    (tree / "tests/double.cpp").write_text("int twice(int x) { return 2 * x; }\n")
    text = toml("not-compiled", "2 * x", "2 * y", 'tests = ["tests/test_double.py"]', "tests/double.cpp")
    (tree / "tests/mutants/tests.toml").write_text(text)
    commit(tree)
    status, said = run(tree, "--only", "not-compiled")
    assert status == 2, said
    assert "not-compiled (tests/double.cpp) no verdict: it does not compile: Something." in said


def test_the_exit_status(tree: Path) -> None:
    assert run(tree, "--only", "killed", "invisible")[0] == 0
    assert run(tree, "--only", "killed", "survivor")[0] == 1
    assert run(tree, "--only", "nobody")[0] == 2


def test_tests_that_fail_anyway_prove_nothing(tree: Path) -> None:
    (tree / "tests/test_sums.py").write_text(TESTS.replace("== 4", "== 5"))
    status, said = run(tree, "--only", "killed")
    assert status == 2
    assert "the tests do not pass without a mutant: pytest ended with 1" in said


def test_those_of_changed_files_and_a_share(tree: Path) -> None:
    parts = [{m.name for m in MUTANTS if tool.in_share(m.name, f"{i}/10")} for i in range(10)]
    assert set().union(*parts) == {m.name for m in MUTANTS}
    assert sum(map(len, parts)) == len(MUTANTS)
    status, said = run(tree, "--changed", "HEAD")
    assert (status, "all " in said) == (0, False), "nothing has changed"
    mutants = tree / "tests/mutants/moe_rt.toml"
    mutants.write_text(mutants.read_text().replace("3 * x", "4 * x"))  # one of four in that file
    status, said = run(tree, "--changed", "HEAD")
    assert status == 0
    assert re.search(r"^all +1 +1 +0", said, re.MULTILINE)
    status, said = run(tree, "--changed", "HEAD^")
    assert status == 0, said
    assert "there is no HEAD^ here" in said


def test_the_time_is_up(tree: Path) -> None:
    status, said = run(tree, "--only", "killed", "--minutes", "0")
    assert status == 0
    assert "1 were not run: the time was up" in said
