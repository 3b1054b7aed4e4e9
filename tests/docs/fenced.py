"""Find the fenced blocks of a Markdown file and check each: it runs, or it quotes the code.

An HTML comment on the line before a block changes how the block is checked:

    <!-- docs-test: skip REASON -->     the block is not run; REASON is one of SKIP_REASONS
    <!-- docs-test: from FILE -->       FILE contains the block's lines, one after the other, and FILE is what runs
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import forked_python

RUN = ("python", "bash")
QUOTED = ("cpp",)
READ_ONLY = ("text", "plain", "mermaid", "c++", "json", "toml", "yaml", "diff", "promela")
SKIP_REASONS = (
    "runs the whole test suite",
    "runs the docs themselves",
    "is run by CI itself",
    "installs the package",
    "is run by tests/gpucheck",
    "is run by make serve-test",
    "needs a GPU",
    "needs root",
    "needs a server",
)
LIMIT_S = 3000.0  # only a hang reaches it
WOULD_RECURSE = ("test", "quick", "sweep", "demo")
INSIDE_A_BLOCK = "MOE_RT_DOCS_TEST"  # set while a block runs, so that it cannot start these tests again

FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^`]*$")
DIRECTIVE = re.compile(r"[ \t]*<!--[ \t]*docs-test:[ \t]*(?P<text>.*?)[ \t]*-->[ \t]*$")
MAKE = re.compile(r"(?:^|[;&|(])[ \t]*(?:\w+=\S*[ \t]+)*make((?:[ \t]+[^\s;&|()]+)*)", re.MULTILINE)
MAKE_RULE = re.compile(r"^([\w.%-][\w.% \t-]*):(?!=)", re.MULTILINE)
COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    path: Path
    line: int  # line of the opening fence, from 1
    language: str
    text: str
    directive: str = ""  # "skip REASON", "from FILE" or empty

    @property
    def skip_reason(self) -> str | None:
        return self._argument("skip")

    @property
    def quoted_file(self) -> str | None:
        return self._argument("from")

    def _argument(self, name: str) -> str | None:
        word, _, argument = self.directive.partition(" ")
        return argument.strip() if word == name else None

    def __str__(self) -> str:
        return f"{self.path.as_posix()}:{self.line}"


class BlockError(AssertionError):
    """The block at this place does not do what the docs promise."""

    def __init__(self, block: Block, message: str) -> None:
        super().__init__(f"{block}: {message}")


def find_blocks(markdown: str, path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of one file, in order; a directive applies to the next block, blank lines aside."""
    lines = enumerate(markdown.splitlines(), start=1)
    directive = ""
    for number, line in lines:
        opened = FENCE.match(line)
        if opened:
            closes = re.compile(rf"[ \t]*{opened['fence'][0]}{{{len(opened['fence'])},}}[ \t]*$")
            body = []
            for _, inner in lines:
                if closes.match(inner):
                    break
                body.append(inner.removeprefix(opened["indent"]) + "\n")
            else:
                raise ValueError(f"{path}:{number}: the block is never closed")
            yield Block(path, number, opened["language"], "".join(body), directive)
        comment = DIRECTIVE.match(line)
        if line.strip():
            directive = comment["text"] if comment else ""


def is_checked(block: Block) -> bool:
    return block.language not in READ_ONLY


def check(block: Block, root: Path) -> None:
    """Check the block, running it unless it is marked as skipped, and raise BlockError if it fails."""
    if block.skip_reason is not None and block.skip_reason not in SKIP_REASONS:
        raise BlockError(block, f"skipped because it {block.skip_reason!r}; the reasons allowed are {SKIP_REASONS}")
    if block.skip_reason is None and block.quoted_file is None and block.directive:
        raise BlockError(block, f"`docs-test: {block.directive}` is neither `skip REASON` nor `from FILE`")
    if not block.text.strip():
        raise BlockError(block, "the block is empty")
    if block.quoted_file is not None:
        check_quoted_file(block, root)
    elif block.language in QUOTED:
        check_quoted(block, root)
    elif block.language not in RUN:
        raise BlockError(block, f"{block.language!r} is none of the languages {RUN + QUOTED + READ_ONLY}")
    elif block.language == "bash":
        check_make_targets(block, root)
        if block.skip_reason is None:
            run_bash(block, root)
    elif block.skip_reason is None:
        run_python(block)


def check_quoted(block: Block, root: Path) -> None:
    """Raise unless C++ in the docs is a quotation: it occurs under cuda/ word for word, white space aside."""
    sources = [path for path in (root / "cuda").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    quotation = " ".join(block.text.split())
    if not any(quotation in " ".join(source.read_text(encoding="utf-8").split()) for source in sources):
        raise BlockError(block, "no file under cuda/ contains this C++")


def check_quoted_file(block: Block, root: Path) -> None:
    """Raise unless the file contains the block's lines word for word, together, as whole lines."""
    source = root / (block.quoted_file or "")
    if not source.is_file():
        raise BlockError(block, f"there is no file {block.quoted_file!r} to quote")
    if f"\n{block.text}" not in f"\n{source.read_text(encoding='utf-8')}":
        raise BlockError(block, f"{block.quoted_file} does not contain these lines")


def check_make_targets(block: Block, root: Path) -> None:
    """Raise unless the Makefile has each `make TARGET`; a block that is run must not run the tests again."""
    makefile = root / "Makefile"
    rules = MAKE_RULE.findall(makefile.read_text(encoding="utf-8")) if makefile.exists() else []
    known = {name for names in rules for name in names.split()}
    for call in MAKE.finditer(COMMENT.sub("", block.text)):
        for target in call[1].split():
            if target.startswith("-") or "=" in target:
                continue
            if target not in known:
                raise BlockError(block, f"the Makefile has no target {target!r}")
            if target in WOULD_RECURSE and block.skip_reason is None:
                message = f"`make {target}` runs these tests again; mark the block `<!-- docs-test: skip REASON -->`"
                raise BlockError(block, message)


def run_bash(block: Block, root: Path) -> None:
    commands = forked_python.commands()
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {"PATH": path, "PYTHON_EXEC": str(commands / "python")}
    run(block, ["bash", "-euo", "pipefail", "-c", block.text], cwd=root, environment=environment)


# The first line of a block's script: tests set OMP_NUM_THREADS=1, which a reader's terminal does not.
READERS_THREADS = "import torch; torch.set_num_threads(2)"


def run_python(block: Block) -> None:
    with tempfile.TemporaryDirectory(prefix="moe_rt-docs-") as directory:
        script = Path(directory, f"{block.path.stem}_block.py")
        # Blank lines replace the text above the block, so that a traceback gives the line in the Markdown file.
        script.write_text(READERS_THREADS + "\n" * block.line + block.text, encoding="utf-8")
        said = forked_python.run_python(script, cwd=Path(directory), env={**os.environ, INSIDE_A_BLOCK: "1"})
        if said.returncode != 0:
            raise BlockError(block, f"exit status {said.returncode}\n{block.text}\n{said.stdout}{said.stderr}")


def run(block: Block, command: list[str], cwd: Path, environment: dict[str, str], limit_s: float = LIMIT_S) -> None:
    """Run the command in a process group, all of which ends with the command or at the limit."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, INSIDE_A_BLOCK: "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if late:
        output, _ = process.communicate()
        raise BlockError(block, f"not done after {limit_s:g} s\n{block.text}\n{output}")
    if process.returncode != 0:
        raise BlockError(block, f"exit status {process.returncode}\n{block.text}\n{output}")
