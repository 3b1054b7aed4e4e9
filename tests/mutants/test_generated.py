"""Generated mutants: what the operators make of a text, who is drawn, which tests run, and what a run prints."""

from __future__ import annotations

import ast
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import executed  # noqa: E402
import generated  # noqa: E402
import sampled_mutants as tool  # noqa: E402
import switches  # noqa: E402

PYTHON = '''
def f(a: int, b: int = 1, *, c: bool = False) -> int:
    """Text."""
    if not a and b < 2:
        g(a, b, x=a, y=b)
    try:
        a.b = 1
        h()
    except OSError:
        raise ValueError(f"{a + 1}") from None
    for i in a:
        continue
    assert a != b
    return a
'''
CPP = """
inline int f(const A& a, int b) {
  if (!a.x() || b < 3) return -1;
  for (int i = 0; i < b; ++i) {
    g(a, b);
    h(i);
    if (b == 2) break;
  }
  static_assert(sizeof(int) == 4);
  if constexpr (kTwo == 2) h(b);
  return b ? max_of(a, b) : std::min(b, 4);
}
constexpr int kTwo = 2;
"""


def changes(file: str, text: str) -> set[tuple[str, str, str]]:
    return {(c.operator, c.find, c.replace) for c in generated.generate(file, text)}


def test_operators_of_python() -> None:
    assert changes("a.py", PYTHON) == {
        ("constant", "1", "2"),
        ("constant", "False", "True"),
        ("constant", "2", "3"),
        ("negated", "not a and b < 2", "not (not a and b < 2)"),
        ("and for or", "and", "or"),
        ("boundary moved", "<", "<="),
        ("left out", "g(a, b, x=a, y=b)", "pass"),
        ("arguments swapped", "a, b", "b, a"),
        ("arguments swapped", "a, y=b", "b, y=a"),
        ("keyword left out", "x=a, ", ""),
        ("keyword left out", "y=b", ""),
        ("left out", "a.b = 1", "pass"),
        ("left out", "h()", "pass"),
        ("neighbours swapped", "a.b = 1\n        h()", "h()\n        a.b = 1"),
        ("error swallowed", 'raise ValueError(f"{a + 1}") from None', "pass"),
        ("jump", "continue", "break"),
        ("returns nothing", "return a", "return None"),
    }
    for change in generated.generate("a.py", PYTHON):
        ast.parse(change.apply(PYTHON))


def test_constants_in_seconds_are_left_alone() -> None:
    assert changes("a.py", "_WAIT_S, LONGEST_2_S = 1.0, 2.0\nTIMEOUT_S = 2\n") == set()
    assert changes("a.py", "WAITS, TIMEOUT_S = 1, 2\n") == {("constant", "1", "2"), ("constant", "2", "3")}
    assert changes("a.py", "x.timeout_s = 2\n") == {("constant", "2", "3"), ("left out", "x.timeout_s = 2", "pass")}


def test_whether_zip_is_strict_is_an_assertion() -> None:
    assert changes("a.py", "x = zip(b, strict=True)\n") == set()
    assert changes("a.py", "x = path.resolve(strict=True)\n") == {
        ("constant", "True", "False"),
        ("keyword left out", "strict=True", ""),
    }


def test_operators_of_cpp_are_of_whole_expressions() -> None:
    found = changes("a.h", CPP)
    assert {
        ("negated", "!a.x() || b < 3", "!(!a.x() || b < 3)"),
        ("negated", "!a.x()", "!!a.x()"),
        ("and for or", "!a.x() || b < 3", "!a.x() && b < 3"),
        ("boundary moved", "i < b", "i <= b"),
        ("arguments swapped", "g(a, b)", "g(b, a)"),
        ("left out", "g(a, b);", ";"),
        ("neighbours swapped", "g(a, b);\n    h(i);", "h(i);\n    g(a, b);"),
        ("jump", "break;", "continue;"),
        ("callee", "std::min(b, 4)", "std::max(b, 4)"),
        ("constant", "4", "5"),
    } <= found
    assert not [change for change in found if "sizeof" in change[1] or "kTwo" in change[1]]


@pytest.mark.parametrize(
    ("file", "text", "swapped"),
    [
        ("a.py", "a = min(b, c) + math.gcd(b, c) + f(b, c)", {("b, c", "c, b")}),
        ("a.py", "a = max(b, c, key=len)", set()),
        ("a.py", "a = torch.equal(b, c) + x.equal(b, c)", {("b, c", "c, b")}),
        ("a.py", "a = np.maximum(b, c) - np.minimum(b, 1)", set()),
        ("a.h", "int f() { return std::min(b, c) + max_of(b, c) + min_of<int64_t>(b, c); }", set()),
        ("a.h", "int f() { return column_max(b, c); }", {("column_max(b, c)", "column_max(c, b)")}),
    ],
)
def test_arguments_whose_order_makes_no_difference_stay(file: str, text: str, swapped: set[tuple[str, str]]) -> None:
    assert {(a, b) for operator, a, b in changes(file, text) if operator == "arguments swapped"} == swapped


@pytest.mark.parametrize(
    ("first", "second", "swapped"),
    [
        ("s.a = 1", "s.b = c", False),
        ("s.a: list[int] = []", "s.b = 2", False),
        ("s.a = ()", "s.ab = (1, 2)", False),
        ("s.a = 1", "s.b = s.a", True),
        ("s.a = s.b", "s.b = 2", True),
        ("s.a = 1", "s.b = f()", True),
        ("s.a = 1", "f()", True),
        ("s[0] = 1", "s[1] = 2", True),
    ],
)
def test_attributes_that_may_be_set_in_any_order_stay(first: str, second: str, swapped: bool) -> None:
    found = changes("a.py", f"def f(s):\n    {first}\n    {second}\n")
    assert bool([change for change in found if change[0] == "neighbours swapped"]) is swapped


def test_a_function_is_named() -> None:
    text = "class A:\n    def f(self):\n        g(1)\n\n\nx = 2\n"
    assert {(c.function, c.find) for c in generated.generate("a.py", text) if c.operator == "constant"} == {
        ("A.f", "1"),
        ("", "2"),
    }


def test_switches_keep_lines_and_may_be_nested() -> None:
    found = generated.generate("a.h", CPP)
    inner = next(c for c in found if c.find == "i < b" and c.operator == "boundary moved")
    outer = next(c for c in found if c.operator == "and for or")
    neighbours = next(c for c in found if c.operator == "neighbours swapped")
    left_out = next(c for c in found if (c.operator, c.find) == ("left out", "h(i);"))
    assert "(moe_rt_mutant(3) ? (i <= b) : (i < b))" in switches.switched(inner, 3, inner.find)
    text = switches._nested(CPP, 0, len(CPP), [(outer, 0), (neighbours, 1), (left_out, 2)])
    assert text.count("\n") == CPP.count("\n")
    assert "if (moe_rt_mutant(1)) { h(i);     g(a, b); } else" in text
    assert "if (moe_rt_mutant(2)) { ; } else { h(i); }" in text
    assert "!a.x() && b < 3" in text


def test_mutants_that_the_compiler_refuses_stay_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = generated.generate("a.h", CPP)[:2]
    monkeypatch.setattr(switches, "compiled_here", lambda root: set())
    monkeypatch.setattr(switches, "_refused", lambda changes, root: list(changes))
    first = switches.compiling(some, tmp_path)
    assert first == switches.compiling(some, tmp_path) == []  # the second answer is the kept one


def test_a_compiler_that_fails_without_naming_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = next(c for c in generated.generate("a.h", CPP) if c.operator == "constant")
    (tmp_path / "a.h").write_text(CPP)
    (tmp_path / "a.cpp").write_text('#include "a.h"\n')
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "a.h", "a.cpp"], cwd=tmp_path, check=True)
    monkeypatch.setattr(switches, "UNITS", {"a.cpp": ()})
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="was not compiled"):
        switches._refused([change], tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="has no sources for this processor")
def test_sources_for_one_kind_of_processor_are_compiled_with_their_options() -> None:
    assert "-mavx2" in switches.UNITS["cuda/cpu/rows_avx2.cpp"]
    assert "-mavx512f" in switches.UNITS["cuda/cpu/rows_avx512.cpp"]
    assert set(switches.UNITS) >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "cuda/cpu").glob("*.cpp")}


def test_marks_of_blocks() -> None:
    text, blocks = executed.instrumented("a.py", PYTHON, 5)
    ast.parse(text)
    assert [(block[2], first) for block, first, _ in blocks] == [(0, 2), (1, 5), (2, 7), (3, 10), (4, 12)]
    assert "_moe_rt_marks[9] = 1" in text
    text, blocks = executed.instrumented_cpp("a.h", CPP, 0)
    assert [(block, first) for block, first, _ in blocks] == [(("a.h", "f", 0), 2)], (
        "loops count as what is around them"
    )
    assert "inline int f(const A& a, int b) { moe_rt_mark(0);" in text


def test_intervals_and_the_table() -> None:
    assert tool.interval(0, 0) == (0.0, 1.0)
    low, high = tool.interval(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    change = generated.generate("a.py", PYTHON)[0]
    lines = tool.table([(change, tool.KILLED), (change, tool.KILLED), (change, tool.SURVIVED), (change, "equivalent")])
    assert lines.splitlines()[-1].split()[:6] == ["all", "2", "1", "1", "0", "67%"]


def test_a_draw_depends_on_its_seed_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PYTHON)
    lines = {}
    for change in generated.generate("a.py", PYTHON):
        lines.setdefault(("a.py", change.line), []).append(change)
    draws = [list(tool.drawn(lines, seed, tmp_path)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert len({change.line for change in draws[0]}) == len(draws[0]) == len(lines)


SOURCE = "def double(x: int) -> int:\n    unused = 1\n    return 2 * x\n\n\ndef nobody() -> int:\n    return 3\n"
# The name of the case is what the function returns, so no mutant leaves a test of that name.
TESTS = """import pytest
from moe_rt.sums import double


@pytest.mark.parametrize("found", [double(2)])
def test_double(found) -> None:
    assert found == 4
"""
EQUIVALENT = """
[[equivalent]]
file = "moe_rt/sums.py"
function = "double"
operator = "constant"
line = "unused = 1"
reason = "No code reads it."
"""


def test_a_run(tmp_path: Path) -> None:
    """Killed, survived for want of a test, and listed as equivalent; the last line is JSON."""
    files = {"moe_rt/__init__.py": "", "moe_rt/sums.py": SOURCE, "tests/test_sums.py": TESTS}
    files |= {"tests/mutants/moe_rt.toml": EQUIVALENT, "cuda/a.h": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    executed.keep(
        executed.kept_as(tmp_path, tmp_path, "tests/test_sums.py"),
        "tests/test_sums.py",
        {
            executed.AT_IMPORT: (0.0, [("moe_rt/sums.py", "double", 0)]),
            "tests/test_sums.py::test_double[4]": (0.1, [("moe_rt/sums.py", "nowhere", 0)]),
        },
    )
    (tmp_path / executed.KEPT).mkdir(parents=True)
    for kept in tmp_path.glob("*.z"):
        kept.rename(tmp_path / executed.KEPT / kept.name)
    command = [sys.executable, str(ROOT / "tools/sampled_mutants.py"), "--root", str(tmp_path), "--jobs", "1"]
    command += ["--sample", "3", "--seed", "4", "--strict", "--log", str(tmp_path / "log")]
    for turn in range(2):  # the second takes the verdicts from the log
        done = subprocess.run(command, capture_output=True, text=True)
        counts = json.loads(done.stdout.splitlines()[-1])
        assert counts == {"seed": 4, "sampled": 3, "killed": 1, "survived": 1, "equivalent": 1, "no_verdict": 0}, done
        assert done.returncode == 1
        assert done.stdout.count(" s  killed") == 1 - turn
        assert len((tmp_path / "log").read_text().splitlines()) == 2
    assert "survived: nobody, " in done.stdout
    assert "no test executes it\n--- a/moe_rt/sums.py\n+++ b/moe_rt/sums.py" in done.stdout


def test_equivalents_fit_the_sources() -> None:
    for listed in tool.equivalents(ROOT):
        text = (ROOT / listed.file).read_text()
        lines = {
            text.splitlines()[change.line - 1].strip()
            for change in generated.generate(listed.file, text)
            if (change.function, change.operator) == (listed.function, listed.operator)
        }
        assert listed.line in lines, listed
        assert listed.reason.endswith(".")
