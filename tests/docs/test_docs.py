"""The docs are true: every fenced block runs, or quotes code that exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from docs.fenced import Block, BlockError

from docs import fenced

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def docs(root: Path) -> list[Path]:
    top = [root / "README.md", root / "CONTRIBUTING.md"]
    return [path for path in (*top, *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def blocks(root: Path) -> list[Block]:
    """Return all blocks that are checked, without repetitions."""
    found = {
        (block.language, block.text, block.directive): block
        for path in reversed(docs(root))
        for block in reversed(list(fenced.find_blocks(path.read_text(encoding="utf-8"), path.relative_to(root))))
    }
    return [block for block in reversed(found.values()) if fenced.is_checked(block)]


def the_block(markdown: str) -> Block:
    (block,) = fenced.find_blocks(markdown, Path("docs/a.md"))
    return block


def test_the_readme_exists() -> None:
    assert (ROOT / "README.md").is_file()


@pytest.mark.parametrize("block", blocks(ROOT), ids=str)
def test_block(block: Block) -> None:
    assert fenced.INSIDE_A_BLOCK not in os.environ, "a block of the docs runs the tests of the docs: mark it as skipped"
    fenced.check(block, ROOT)
    if block.skip_reason is not None:
        pytest.skip(block.skip_reason)


def test_every_quotation_stands_in_the_code() -> None:
    """Every quotation occurs in the code. This test has one name for all, independent of line numbers."""
    quoted = [block for block in blocks(ROOT) if block.language in fenced.QUOTED]
    assert quoted
    for block in quoted:
        fenced.check(block, ROOT)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_document_says_how_to_run_the_example(example: Path) -> None:
    """Exactly one block that is run names the example, so every example is run once."""
    run = (None, "is run by make serve-test")
    commands = [block.text for block in blocks(ROOT) if block.language == "bash" and block.skip_reason in run]
    assert sum(f"examples/{example.name}" in command for command in commands) == 1


def test_blocks_are_found_with_their_lines_and_directives(tmp_path: Path) -> None:
    markdown = """# Title
```python
x = 1
```
<!-- docs-test: skip REASON -->

~~~bash title="x"
echo '
```
'
~~~
A sentence.

- <!-- not one of ours -->
  ````text
  ```
    two
  ````
"""
    path = Path("a.md")
    assert list(fenced.find_blocks(markdown, path)) == [
        Block(path, 2, "python", "x = 1\n"),
        Block(path, 7, "bash", "echo '\n```\n'\n", "skip REASON"),
        Block(path, 15, "text", "```\n  two\n"),
    ]
    (tmp_path / "README.md").write_text(markdown)
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "deep" / "b.md").write_text("```cpp\nx;\n```\n")
    assert [str(block) for block in blocks(tmp_path)] == ["README.md:2", "README.md:7", "docs/deep/b.md:1"]


def test_a_directive_holds_for_the_next_block_only() -> None:
    markdown = (
        "<!-- docs-test: skip A -->\n```bash\na\n```\n```bash\nb\n```\n"
        "<!-- docs-test: skip B -->\nProse\n```bash\nc\n```\n"
    )
    assert [block.directive for block in fenced.find_blocks(markdown, Path("a.md"))] == ["skip A", "", ""]


def test_an_open_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.md:3: the block is never closed"):
        list(fenced.find_blocks("One\n\n```bash\necho\n", Path("a.md")))


SOUND = [
    "```python\nfrom pathlib import Path\nassert Path.cwd() == Path(__file__).resolve().parent\n```\n",
    '```bash\ntest "$MOE_RT_DOCS_TEST" = 1\necho to make gone\n```\n',
    "```bash\ntest -f Makefile && which python # make nothing\nmake -s hello X=1 && make world\n```\n",
    "```cpp\nint f()  {\n    return 1;\n}\n```\n",
    "<!-- docs-test: skip needs a GPU -->\n```bash\nexit 1\n```\n",
    "<!-- docs-test: skip needs a GPU -->\n```python\nraise SystemExit(1)\n```\n",
    "<!-- docs-test: skip runs the whole test suite -->\n```bash\nmake test\n```\n",
    "<!-- docs-test: from a.py -->\n```python\ny = 1\nraise SystemExit(y)\n```\n",
]

# (markdown, pattern of the failure)
BROKEN = [
    ("```python\nx = 1\nraise KeyError('gone')\n```\n", r"(?s)docs/a\.md:1: exit status 1.*line 3.*KeyError: 'gone'"),
    ("```bash\nfalse | cat\n```\n", r"docs/a\.md:1: exit status 1"),
    ("```bash\nfalse\ntrue\n```\n", "exit status 1"),
    ("```bash\necho $MOE_RT_NOT_SET\n```\n", "unbound variable"),
    ("```bash\nmake gone\n```\n", "the Makefile has no target 'gone'"),
    ("<!-- docs-test: skip needs a GPU -->\n```bash\nmake gone\n```\n", "the Makefile has no target 'gone'"),
    ("```bash\ncd . && make -j2 test\n```\n", "`make test` runs these tests again; mark the block"),
    ("```bash\nmake demo\n```\n", "`make demo` runs these tests again; mark the block"),
    ("<!-- docs-test: skip is boring -->\n```bash\ntrue\n```\n", "skipped because it 'is boring'; the reasons allowed"),
    ("<!-- docs-test: skip -->\n```bash\ntrue\n```\n", "skipped because it ''; the reasons allowed"),
    ("<!-- docs-test: skp needs a GPU -->\n```bash\ntrue\n```\n", "is neither `skip REASON` nor `from FILE`"),
    ("<!-- docs-test: from gone.py -->\n```python\ny = 1\n```\n", "there is no file 'gone.py' to quote"),
    ("<!-- docs-test: from a.py -->\n```python\ny = 1\nz = 2\n```\n", "a.py does not contain these lines"),
    ("<!-- docs-test: from a.py -->\n```python\n= 1\n```\n", "a.py does not contain these lines"),
    ("```cpp\nint f() { return 2; }\n```\n", "no file under cuda/ contains this C"),
    ("```pyhton\nx\n```\n", "'pyhton' is none of the languages"),
    ("```\nx\n```\n", "'' is none of the languages"),
    ("```bash\n\n```\n", "the block is empty"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text("X := 2\n.PHONY: hello world\nhello world: a\na:\n\ttrue\ndemo:\ntest: hello\n")
    (tmp_path / "a.py").write_text("x = 1\ny = 1\nraise SystemExit(y)\nz = 2\n")
    (tmp_path / "cuda" / "cpu").mkdir(parents=True)
    (tmp_path / "cuda" / "cpu" / "f.h").write_text("// Before.\nint f() {\n  return 1;\n}\n")
    return tmp_path


@pytest.mark.parametrize("markdown", SOUND)
def test_a_sound_block_passes(tree: Path, markdown: str) -> None:
    fenced.check(the_block(markdown), tree)


@pytest.mark.parametrize(("markdown", "message"), BROKEN)
def test_a_broken_block_fails(tree: Path, markdown: str, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        fenced.check(the_block(markdown), tree)


def test_a_block_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    block = the_block("```bash\nsleep 6000 &\necho $! > child; wait\n```\n")
    child, limit_s = tmp_path / "child", 1.0
    child.touch()
    while not child.read_text():  # on a busy machine a child may take longer than the limit to start
        with pytest.raises(BlockError, match=f"not done after {limit_s:g} s"):
            fenced.run(block, ["bash", "-c", block.text], cwd=tmp_path, environment={}, limit_s=limit_s)
        limit_s *= 4
    assert ends(int(child.read_text()))


def test_what_a_block_leaves_behind_is_ended(tmp_path: Path) -> None:
    block = the_block("```bash\nsleep 6000 >/dev/null 2>&1 &\necho $! > child\n```\n")
    fenced.run(block, ["bash", "-c", block.text], cwd=tmp_path, environment={})
    assert ends(int((tmp_path / "child").read_text()))


def ends(pid: int) -> bool:
    """True if the process exits, or becomes a zombie, within about a minute."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False
