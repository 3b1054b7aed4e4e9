"""A copy of the tracked files in which sources may be changed: Python imports moe_rt from it, tests run in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

# What site-packages imports at start to find an editable install; an empty module of that name leaves it unfound.
EDITABLE_FINDER = "_editable_skbc_moe_rt"
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")


class ScratchTree:
    """The tracked files of `source`, as they are now, under `root`."""

    def __init__(self, source: Path, root: Path) -> None:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=source, check=True, stdout=subprocess.PIPE, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name)
        self.root = root
        self._beside = root / "build/beside"
        self._beside.mkdir(parents=True)
        (self._beside / f"{EDITABLE_FINDER}.py").touch()
        self._newest = 0.0

    def take_engine(self) -> None:
        """The compiled engine of the running environment's moe_rt, which was built from sources without a change."""
        package = find_spec("moe_rt")
        places = package.submodule_search_locations if package and package.submodule_search_locations else ()
        self._take_engine(engine for place in places for engine in Path(place).glob("_engine*.so"))

    def build_engine(self, header: str) -> None:
        """Builds the engine of this tree's sources as they are now; every source includes `header` first."""
        (self._beside / "first.h").write_text(header)
        installed = self._beside / "installed"
        flags = f"{os.environ.get('CXXFLAGS', '')} -include {self._beside / 'first.h'}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), "."]
        subprocess.run(command, cwd=self.root, env={**os.environ, "CXXFLAGS": flags}, check=True)
        self._take_engine((installed / "moe_rt").glob("_engine*.so"))

    @contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Files with other texts for a while."""
        before = {name: (self.root / name).read_text() for name in texts}
        try:
            self._write(texts)
            yield
        finally:
            self._write(before)

    def run_tests(self, tests: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
        """pytest's exit status, or None if it took longer than that, and what it printed."""
        env = self._environment() | environment
        process = subprocess.Popen(
            [*PYTEST, *tests],
            cwd=self.root,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            end_session(process.pid)
            process.wait()
        return process.returncode, output

    def _write(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            path = self.root / name
            # Python takes a module for unchanged that has the same size and the same second of writing.
            self._newest = max(self._newest + 2, path.stat().st_mtime + 2)
            path.write_text(text)
            os.utime(path, (self._newest, self._newest))

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, (self._beside, self.root)))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def _take_engine(self, found: Iterable[Path]) -> None:
        """Copies the first of these, and makes sure that this tree is imported: else every mutant would survive."""
        shutil.copy2(next(iter(found)), self.root / "moe_rt")
        code = "import moe_rt, moe_rt._engine as e; print(moe_rt.__file__); print(e.__file__)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=self._environment(), cwd="/", check=True, stdout=subprocess.PIPE, text=True)
        for file in map(Path, done.stdout.split()):
            if not file.resolve().is_relative_to(self.root.resolve()):
                raise RuntimeError(f"Python imports {file}, expected a file under {self.root}")


def end_session(leader: int) -> None:
    """Ends what tests that were cut off left running."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
