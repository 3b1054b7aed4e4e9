"""A copy of the tracked files in which sources can be changed. Python imports moe_rt from it, and tests run in it."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

# Module that site-packages imports at start to find an editable install. An empty module of this name disables it.
EDITABLE_FINDER = "_editable_skbc_moe_rt"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider")
# Importing torch takes longer than most tests, so a process that has imported it forks one child per run of pytest.
RUNNER = """
import json, os, sys
import pytest, torch
for line in sys.stdin:
    arguments, environment, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), target)
        os.environ.update(environment)
        sys.exit(pytest.main(arguments))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ScratchTree:
    """Copy of the current tracked files of `source` under `root`; `programs` keeps compiled test programs."""

    def __init__(self, source: Path, root: Path, programs: Path | None = None) -> None:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=source, check=True, stdout=subprocess.PIPE, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name)
        self.root = root
        self._beside = root / "build/beside"
        self._beside.mkdir(parents=True)
        (self._beside / f"{EDITABLE_FINDER}.py").touch()
        if programs is not None:  # of other trees, which test programs of the same text are taken from
            programs.mkdir(parents=True, exist_ok=True)
            (root / "build/tests").symlink_to(programs.resolve())
        self._newest = 0.0
        self._runner: subprocess.Popen[bytes] | None = None

    def take_engine(self) -> None:
        """Copy the compiled engine of the running environment's moe_rt, which was built from unchanged sources."""
        package = find_spec("moe_rt")
        places = package.submodule_search_locations if package and package.submodule_search_locations else ()
        self._take_engine(engine for place in places for engine in Path(place).glob("_engine*.so"))

    def take_engine_from(self, engine: Path) -> None:
        """Copy an engine that was built from the same sources."""
        self._take_engine([engine])

    def build_engine(self, header: str) -> None:
        """Build the engine from this tree's current sources; every source includes `header` first."""
        (self._beside / "first.h").write_text(header)
        installed = self._beside / "installed"
        flags = f"{os.environ.get('CXXFLAGS', '')} -include '{self._beside / 'first.h'}'"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), "."]
        subprocess.run(command, cwd=self.root, env={**os.environ, "CXXFLAGS": flags}, check=True)
        self._take_engine((installed / "moe_rt").glob("_engine*.so"))

    @contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Replace texts of files within the block."""
        before = {name: (self.root / name).read_text() for name in texts}
        try:
            self._write(texts)
            yield
        finally:
            self._write(before)

    def run_tests(self, tests: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
        """Run tests; return pytest's exit status, or None if it took longer than `seconds`, and its output."""
        if self._runner is None or self._runner.poll() is not None:  # it may have been killed for memory
            command, pipe = [sys.executable, "-c", RUNNER], subprocess.PIPE
            env = self._environment()
            # Unbuffered, since select does not see data in Python's buffers.
            self._runner = subprocess.Popen(command, cwd=self.root, env=env, bufsize=0, stdin=pipe, stdout=pipe)
        asked, told = self._runner.stdin, self._runner.stdout
        assert asked is not None
        assert told is not None
        output = self._beside / "output"
        output.write_text("")
        asked.write(json.dumps([[*PYTEST, *tests], environment, str(output)]).encode() + b"\n")
        leader = int(told.readline())
        in_time = bool(select.select([told], [], [], seconds)[0])
        with suppress(ProcessLookupError):  # remaining processes of the tests, or all of them after a timeout
            os.killpg(leader, signal.SIGKILL)
        status = int(told.readline())
        return (status, output.read_text(errors="replace")) if in_time else (None, "")

    def close(self) -> None:
        """End the process that starts runs."""
        if self._runner is not None:
            self._runner.communicate()

    def _write(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            path = self.root / name
            # Python treats a module as unchanged if its size and its second of writing are the same.
            self._newest = max(self._newest + 2, path.stat().st_mtime + 2)
            path.write_text(text)
            os.utime(path, (self._newest, self._newest))

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, (self._beside, self.root)))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def _take_engine(self, found: Iterable[Path]) -> None:
        """Copy the first of these, and check that this tree is imported: otherwise every mutant would survive."""
        self.engine = self.root / f"moe_rt/_engine{EXTENSION_SUFFIXES[0]}"
        shutil.copy2(next(iter(found)), self.engine)
        code = "import moe_rt, moe_rt._engine as e; print(moe_rt.__file__); print(e.__file__)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=self._environment(), cwd="/", check=True, stdout=subprocess.PIPE, text=True)
        for file in map(Path, done.stdout.splitlines()):
            if not file.resolve().is_relative_to(self.root.resolve()):
                raise RuntimeError(f"Python imports {file}, expected a file under {self.root}")
