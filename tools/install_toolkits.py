"""Installs the CUDA compilers that torch's own builds pin, beside the newest one, for the tests that compile with them.

    python tools/install_toolkits.py

Each constraints-cuda-*.txt gets an environment of its own under the running one, which finds everything else in the
running one, but for packages of CUDA: a compiler would take another one's headers. What is there already and has not
changed is left alone.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_CUDA = ("cuda", "nvidia", "nvshmem")  # how names of such packages begin, and of their modules


def main() -> None:
    for constraints in sorted(ROOT.glob("constraints-cuda-*.txt")):
        home = Path(sys.prefix) / "toolkits" / constraints.stem.removeprefix("constraints-cuda-")
        install(constraints, home, "--no-deps", hidden=OF_CUDA)


def install(
    constraints: Path, home: Path, *flags: str, without: tuple[str, ...] = (), hidden: tuple[str, ...] = ()
) -> None:
    """Makes the environment `home`, which is complete once it holds a copy of the constraints; flags are pip's.

    Packages in `without` are taken out again. What begins with one of `hidden` is not found in the running environment.
    """
    done, wanted = home / constraints.name, constraints.read_text()
    if done.is_file() and done.read_text() == wanted:
        return
    venv.create(home, clear=True, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", *flags, "--requirement", str(constraints)], check=True)
    if without:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *without], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    places = _links(home / "rest", hidden) if hidden else site.getsitepackages()
    rest = "; ".join(f"site.addsitedir({path!r})" for path in places)
    (Path(packages) / "rest.pth").write_text(f"import site; {rest}\n")  # after this environment's own packages
    done.write_text(wanted)


def _links(folder: Path, hidden: tuple[str, ...]) -> list[str]:
    """A folder of links to what the running environment has, without what is hidden."""
    folder.mkdir()
    for path in (path for place in site.getsitepackages() for path in Path(place).iterdir()):
        if not path.name.startswith(hidden):
            (folder / path.name).symlink_to(path)
    return [str(folder)]


if __name__ == "__main__":
    main()
