"""Install the CUDA compilers that torch's own builds pin, next to the newest one, for the tests that compile with them.

    python tools/install_toolkits.py

Each constraints-cuda-*.txt gets an environment under the running one, in which it finds everything else except packages
of CUDA, since a compiler would use another compiler's headers. Environments that are up to date are kept.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_CUDA = ("cuda", "nvidia", "nvshmem")  # prefixes of the names of such packages and their modules


def main() -> None:
    for constraints in sorted(ROOT.glob("constraints-cuda-*.txt")):
        home = Path(sys.prefix) / "toolkits" / constraints.stem.removeprefix("constraints-cuda-")
        install(constraints, home, "--no-deps", hidden=OF_CUDA)


def install(
    constraints: Path, home: Path, *flags: str, without: tuple[str, ...] = (), hidden: tuple[str, ...] = ()
) -> None:
    """Create the environment `home`, which is complete once it holds a copy of the constraints. `flags` are pip's.

    Packages in `without` are uninstalled again. Names that begin with one of `hidden` are not found in the running
    environment.
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
    """Create a folder of links to the running environment's packages, except hidden ones."""
    folder.mkdir()
    for path in (path for place in site.getsitepackages() for path in Path(place).iterdir()):
        if not path.name.startswith(hidden):
            (folder / path.name).symlink_to(path)
    return [str(folder)]


if __name__ == "__main__":
    main()
