"""Every rule of tools/check_tree.py finds a tree that breaks it, and this tree breaks none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUNCTION = "{head} {{\n" + "  work();\n" * 60 + "}}\n"


def check(root: Path) -> tuple[int, list[str]]:
    """Return the exit status and the findings for a tree."""
    command = [sys.executable, str(ROOT / "tools" / "check_tree.py"), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def write(root: Path, tree: dict[str, str]) -> Path:
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def py(code: str) -> str:
    return f'"""A module."""\n{code}\n'


def cpp(code: str) -> str:
    return f"// A header.\n{code}\n"


# (id, file, its text, place and text of the finding)
BROKEN = [
    ("file-budget-py", "bench/a.py", py("x = 1\n" * 499), "bench/a.py:501: the file has 501 lines"),
    ("file-budget-pml", "docs/a.pml", "skip\n" * 501, "docs/a.pml:501: the file has 501 lines"),
    (
        "function-budget",
        "cuda/protocol/a.h",
        cpp("namespace a {\n" + FUNCTION.format(head="template <class T>\nvoid f(T t)") + "}"),
        "cuda/protocol/a.h:3: the function has 63 lines",
    ),
    (
        "function-budget-member",
        "cuda/gpu/a.cuh",
        cpp("struct alignas(64) A : B {\n  int x{0};\n" + FUNCTION.format(head="  A(int n = {}) : x{n}, y(n)") + "};"),
        "cuda/gpu/a.cuh:4: the function has 62 lines",
    ),
    (
        "function-budget-py",
        "tests/a.py",
        py("class A:\n    @staticmethod\n    def f():\n" + "        work()\n" * 60),
        "tests/a.py:4: the function has 61 lines",
    ),
    ("opening-py", "bench/a.py", py('def f():\n    """Of each rank, the rows."""'), "bench/a.py:3: it opens with"),
    ("opening-comment", "bench/a.py", py("x = 1\n# Whether all ranks are\n# there."), "bench/a.py:3: it opens with"),
    ("opening-cpp", "cuda/cpu/a.h", cpp("int x;\n// Where rows start.\n"), "cuda/cpu/a.h:3: it opens with a fragment"),
    ("word-py", "bench/a.py", py("# A peer is told of it."), "bench/a.py:2: `told` is not a term"),
    ("word-md", "docs/a.md", "# A\n\nIt is there,\nbut waits in vain.\n", "docs/a.md:4: `in vain` is not a term"),
    ("columns", "docs/a.md", "# A\n\n" + "word " * 25 + "\n", "docs/a.md:3: the line has 125 columns"),
    ("sentence", "docs/a.md", "# A\n\nIs. " + "word word\n" * 31, "docs/a.md:3: a sentence has 63 words"),
    ("braces", "cuda/protocol/a.h", cpp("void f() { {"), "cuda/protocol/a.h:1: its braces do not balance"),
    ("first-sentence-py", "bench/a.py", "x = 1\n", "bench/a.py:1: the module does not start with a docstring"),
    ("first-sentence-cpp", "cuda/cpu/a.cpp", "#pragma once\n", "cuda/cpu/a.cpp:1: the file does not start with"),
    ("std-atomic", "cuda/cpu/a.h", cpp("std::atomic<int> x;"), "cuda/cpu/a.h:2: `std::atomic` belongs in"),
    ("atomic-ref", "cuda/cpu/a.h", cpp("using std::experimental::atomic_ref;"), "cuda/cpu/a.h:2: `atomic_ref`"),
    ("memory-order", "cuda/cpu/a.h", cpp("f(memory_order_relaxed);"), "cuda/cpu/a.h:2: `memory_order`"),
    ("builtin", "tests/protocol/a.cpp", cpp("__atomic_load_n(p, 0);"), "tests/protocol/a.cpp:2: `__atomic_`"),
    ("cuda-atomic", "cuda/gpu/a.cuh", cpp("cuda::atomic_thread_fence();"), "cuda/gpu/a.cuh:2: `cuda::atomic`"),
    ("cuda-intrinsic", "cuda/gpu/a.cuh", cpp("atomicAdd(p, 1);"), "cuda/gpu/a.cuh:2: `atomicAdd(` belongs"),
    ("sfence", "cuda/cpu/a.h", cpp("_mm_sfence();"), "cuda/cpu/a.h:2: `_mm_sfence` belongs"),
    (
        "asm-fence",
        "cuda/gpu/a.cuh",
        cpp('asm volatile("fence.acq_rel.sys;");'),
        "cuda/gpu/a.cuh:2: `asm volatile`",
    ),
    ("asm-empty", "cuda/cpu/a.h", cpp('asm volatile("" ::: "memory");'), "cuda/cpu/a.h:2: `asm volatile`"),
    ("while-true", "cuda/cpu/a.h", cpp("/* one\ntwo */ while (true) {}"), "cuda/cpu/a.h:3: this loop may never end"),
    ("while-1", "cuda/cpu/a.h", cpp("do {} while ( 1 );"), "cuda/cpu/a.h:2: this loop may never end"),
    ("for-ever", "cuda/cpu/a.h", cpp("for (int i = f();; ++i) {}"), "cuda/cpu/a.h:2: this loop may never end"),
    ("poll", "cuda/cpu/a.h", cpp("while (load_acquire(at(x)) < n) {}"), "cuda/cpu/a.h:2: this loop may never end"),
    ("poll-for", "cuda/cpu/a.h", cpp("for (; !load_relaxed<int>(x);) {}"), "cuda/cpu/a.h:2: this loop may never end"),
    ("python-wait", "moe_rt/elastic.py", py("while True:\n    pass"), "moe_rt/elastic.py:2: `while True` has no end"),
    ("pickle", "moe_rt/elastic.py", py("import pickle"), "moe_rt/elastic.py:2: imports pickle"),
    ("pickle-from", "moe_rt/elastic.py", py("from pickle import dumps"), "moe_rt/elastic.py:2: imports pickle.dumps"),
    (
        "objects",
        "moe_rt/elastic.py",
        py("dist.all_gather_object(x, y)"),
        "moe_rt/elastic.py:2: uses dist.all_gather_object",
    ),
    (
        "torch-load",
        "moe_rt/elastic.py",
        py("torch.load(f, weights_only=False)"),
        "moe_rt/elastic.py:2: torch.load without",
    ),
    (
        "shared-memory",
        "moe_rt/memory/shm.py",
        py("from multiprocessing import shared_memory"),
        "moe_rt/memory/shm.py:2: imports multiprocessing.shared_memory",
    ),
    (
        "upwards",
        "moe_rt/buffer/buffer.py",
        py("from moe_rt.nn.layer import f"),
        "moe_rt/buffer/buffer.py:2: imports moe_rt.nn.layer.f, which",
    ),
    (
        "upwards-late",
        "moe_rt/ops/table.py",
        py("def f():\n    from ..nn import layer"),
        "moe_rt/ops/table.py:3: imports moe_rt.nn.layer",
    ),
    (
        "upwards-sub",
        "moe_rt/engine/a/b.py",
        py("from ...buffer.shm import x"),
        "moe_rt/engine/a/b.py:2: imports moe_rt.buffer",
    ),
    (
        "same-level",
        "moe_rt/lab/bench/a.py",
        py("from moe_rt.lab.check import b"),
        "moe_rt/lab/bench/a.py:2: imports moe_rt.lab.check.b, which is not below moe_rt.lab.bench",
    ),
    ("upwards-root", "moe_rt/elastic.py", py("import moe_rt"), "moe_rt/elastic.py:2: imports moe_rt, which"),
    (
        "upwards-else",
        "moe_rt/elastic.py",
        py("if TYPE_CHECKING:\n    pass\nelse:\n    import moe_rt.cli"),
        "moe_rt/elastic.py:5: imports moe_rt.cli",
    ),
    ("no-level", "moe_rt/extra.py", py("x = 1"), "moe_rt/extra.py:1: moe_rt.extra has no place"),
    ("mark", "docs/a.md", "One\n\nTO" + "DO: two\n", "docs/a.md:3: `TO" + "DO` is unfinished"),
    ("mark-py", "tests/a.py", py("mark.x" + "fail(f)"), "tests/a.py:2: `x" + "fail` is unfinished"),
    ("machine-path", "a.toml", 'path = "/tm' + 'p/cache"\n', "a.toml:1: `/tm" + "p/c` is unfinished work or the path"),
    ("link", "docs/a.md", "# A\n[b](b.md)\n", "docs/a.md:2: the link b.md points at no file"),
    ("link-up", "docs/a.md", "![b](../b.png)\n", "docs/a.md:1: the link ../b.png points at no file"),
    ("link-absolute", "docs/a.md", "[a](/docs/a.md)\n", "docs/a.md:1: the link /docs/a.md points at no file"),
    ("link-reference", "docs/a.md", "[b]\n\n[b]: b.md\n", "docs/a.md:3: the link b.md points at no file"),
    ("link-anchor", "docs/a.md", "# A\n```\n# B\n```\n[b](#b)\n", "docs/a.md:5: the link #b points at no heading"),
]


@pytest.mark.parametrize(("path", "text", "finding"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_rule_is_found(tmp_path: Path, path: str, text: str, finding: str) -> None:
    status, findings = check(write(tmp_path, {path: text}))
    assert status == 1
    assert len(findings) == 1, findings
    assert findings[0].startswith(finding)


# Texts that resemble a breach of a rule and are none.
SOUND = {
    "README.md": "# A `b`, [c](docs/d.md)\n\n## a\n\n## a\n\n"
    "[1](#a-b-c) [2](#a-1) [3](docs/d.md#x_y 'title') [4](docs) [5](https://example.org/x.md) `[6](x.md)`\n"
    "[^1]: note\n\n```text\n[7](x.md)\n```\n",
    "docs/d.md": "# X_y\n[root](../README.md#a) [code](../cuda/cpu/a.h#L1) [here](.)\n",
    "cuda/protocol/core/atomics.h": cpp("std::memory_order_acquire; _mm_sfence();"),
    "cuda/protocol/core/signal.h": cpp("while (load_acquire(x) < n) {}"),
    "cuda/protocol/flat/long.h": cpp(
        "struct A {\n"
        + FUNCTION.format(head="int f()").replace("  work();\n", "", 2)
        + "};\n#define M {\n"
        + "constexpr int kTable[] = {\n"
        + "  1,\n" * 100
        + "};"
    ),
    "cuda/cpu/a.h": cpp(
        "// std::atomic, while (true)\n"
        "/* memory_order */ const char* s = \"for (;;) std::atomic\"; const char c = '\"'; int n = 1'000;\n"
        "for (int i = 0; i < load(n); ++i) {} for (auto x : xs) {} while (x < y) { y = load_acquire(p); }\n"
        'asm volatile("st.global.L1::no_allocate.b32 [%0], %1;" :: "l"(p), "r"(x) : "memory"); __syncthreads();'
    ),
    "moe_rt/__init__.py": py("from moe_rt.nn.layer import Layer"),
    "moe_rt/cli.py": py("from . import train"),
    "moe_rt/memory/__init__.py": "",
    "moe_rt/memory/shm.py": py("from . import rendezvous\nfrom .. import errors\nimport mmap"),
    "moe_rt/nn/router.py": py(
        "import typing\nfrom moe_rt.ops.table import f\nif typing.TYPE_CHECKING:\n    from moe_rt.train import loop\n"
        "while x:\n    torch.load(f, weights_only=True)"
    ),
    "tests/wait.py": py("while True:\n    import pickle"),
}


def test_a_sound_tree_is_clean(tmp_path: Path) -> None:
    assert check(write(tmp_path, SOUND)) == (0, [])


def test_ignored_files_are_not_checked(tmp_path: Path) -> None:
    tree = {".gitignore": "build/\n", "build/a.py": "x = 1\n", "new.py": "x = 1\n", "gone.py": "x = 1\n"}
    write(tmp_path, tree)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "gone.py"], cwd=tmp_path, check=True)
    (tmp_path / "gone.py").unlink()
    status, findings = check(tmp_path)
    assert status == 1
    assert [finding.split(":")[0] for finding in findings] == ["new.py"]


def test_a_binary_file_is_not_read_but_can_be_linked(tmp_path: Path) -> None:
    write(tmp_path, {"a.md": "![b](b.png)\n"})
    (tmp_path / "b.png").write_bytes(b"\0TO" + b"DO")
    assert check(tmp_path) == (0, [])


def test_a_module_that_does_not_parse_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)bench/a\.py.*SyntaxError"):
        check(write(tmp_path, {"bench/a.py": "def f(:\n"}))


def test_this_tree_is_clean() -> None:
    status, findings = check(ROOT)
    assert not findings, "\n".join(findings)
    assert status == 0
