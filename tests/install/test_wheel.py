"""The sdist and the wheel that `make wheel` built are complete, and work without a compiler.

Building takes a compiler and a minute, so it is done beforehand: MOE_RT_DIST names the directory with both files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from install import environments
from test_extras import WORKS, where_an_error_leads

import moe_rt

ROOT = Path(__file__).resolve().parents[2]
DIST = os.environ.get("MOE_RT_DIST")

pytestmark = pytest.mark.skipif(DIST is None, reason="`make wheel` builds the wheel and runs this")


def built(pattern: str) -> Path:
    (path,) = Path(DIST or "").glob(pattern)
    return path


def tracked(*under: str) -> set[str]:
    return set(subprocess.check_output(["git", "ls-files", *under], cwd=ROOT, text=True).split())


def test_the_wheel_has_the_package_its_kernels_its_documents_and_nothing_else() -> None:
    names = set(zipfile.ZipFile(built("*.whl")).namelist())
    kernels = {f"moe_rt/{name}" for name in tracked("cuda/protocol", "cuda/gpu") if name.endswith((".h", ".cu"))}
    documents = {f"moe_rt/{name}" for name in tracked("docs") if name.endswith(".md")}
    package = {name for name in names if ".dist-info/" not in name}
    engine = {name for name in package if name.startswith("moe_rt/_engine.") and name.endswith(".so")}
    assert len(engine) == 1
    assert package == tracked("moe_rt") | kernels | documents | engine


def test_the_sdist_has_what_a_build_needs() -> None:
    with tarfile.open(built("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = tracked("moe_rt", "cuda", "docs") | {
        "pyproject.toml",
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "PKG-INFO",
    }
    assert wanted <= names
    assert not {name for name in names if name.startswith((".ci/", "bench/results/", "build/", ".venv/"))}


def test_both_say_the_version_that_the_package_says() -> None:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        assert f"\nVersion: {moe_rt.__version__}\n" in wheel.read(name).decode()
    assert built("*.tar.gz").name == f"moe_rt-{moe_rt.__version__}.tar.gz"


def test_it_works_where_there_is_no_compiler(tmp_path: Path) -> None:
    site = environments.make(tmp_path / "environment", "")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site]
    subprocess.run([*install, built("*.whl")], check=True, timeout=3000)
    programs = tmp_path / "environment" / "bin"
    assert not any(shutil.which(name, path=str(programs)) for name in ("cc", "c++", "gcc", "g++", "clang", "cmake"))
    run = subprocess.run(
        [programs / "python", "-I", Path(__file__).with_name("uses.py"), "train", "transformers", "gpucheck compile"],
        cwd=tmp_path, capture_output=True, text=True, timeout=3000, check=True,
        env=environments.variables(PATH=str(programs), CC="", CXX=""),
    )  # fmt: skip
    results = json.loads(run.stdout)
    for name in WORKS:
        status, output = results[name]
        assert status == 0, f"{name}: {output}"
    assert moe_rt.__version__ in results["version"][1]
    where_an_error_leads(results)
