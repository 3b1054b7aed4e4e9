"""Every extra, installed by itself, makes its features work; any other feature asks for the extra it needs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from install import environments

import moe_rt
from moe_rt import _engine
from moe_rt.extras import how_to_install

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("", "cuda", "train", "bench", "transformers")
WORKS = ("round", "help", "version", "info", "bench help", "chaos help", "gpucheck help", "train help", "pages")
# These are slow, and tested elsewhere if the packages are installed: compiling every kernel, importing Transformers.
LEFT_OUT = {"cuda": ["gpucheck compile"], "bench": ["transformers"]}
Results = dict[str, tuple[int, str]]


def environment(path: Path, extra: str) -> Path:
    """Return the Python of an environment with moe_rt as a wheel lays it out, its requirements, and nothing else."""
    site = environments.make(path, extra)
    (site / "moe_rt").mkdir()
    compiled = Path(_engine.__file__)
    for part in (*Path(moe_rt.__file__).parent.iterdir(), compiled, compiled.parent / "cuda", ROOT / "docs"):
        (site / "moe_rt" / part.name).symlink_to(part)
    (site / "moe_rt-0.dist-info").mkdir()
    (site / "moe_rt-0.dist-info" / "METADATA").write_text(f"Name: moe_rt\nVersion: {moe_rt.__version__}\n")
    return path / "bin" / "python"


@pytest.fixture(scope="module", params=EXTRAS)
def used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Results]:
    path = tmp_path_factory.mktemp("environment")
    python = environment(path, request.param)
    result = subprocess.run(
        [python, "-I", Path(__file__).with_name("uses.py"), *LEFT_OUT.get(request.param, ())],
        cwd=path, capture_output=True, text=True, timeout=3000, check=True,
        env=environments.variables(),
    )  # fmt: skip
    return request.param, json.loads(result.stdout)


def test_what_every_install_can_do(used: tuple[str, Results]) -> None:
    for name in WORKS:
        status, output = used[1][name]
        assert status == 0, f"{name}: {output}"


def where_an_error_leads(results: Results) -> None:
    """The command at the end of a message shows the error's section."""
    status, refused = results["bench refused"]
    assert status == 1
    assert refused.endswith("(moe-rt docs errors#invalidconfig)\n")
    status, shown = results["docs"]
    assert status == 0, shown
    assert shown.startswith("## InvalidConfig\n")
    assert shown in (ROOT / "docs/errors.md").read_text()


def test_an_error_says_where_to_read_on(used: tuple[str, Results]) -> None:
    where_an_error_leads(used[1])


def test_what_is_missing_is_asked_for(used: tuple[str, Results]) -> None:
    extra, results = used
    for name, (_, output) in results.items():
        if name != "transformers":  # this is an import, so Python prints a traceback; its last line is checked below
            assert "Traceback" not in output, f"{name}: {output}"
    status, training = results["train"]
    assert status == 1
    trains = "data: got nowhere, expected a readable file or directory"
    wanted = trains if extra in ("train", "bench") else "pip install '.[train]'"
    assert wanted in training
    assert training.count("\n") == 1, training
    status, report = results["bench report"]
    assert status == 1
    if extra in ("train", "bench"):
        assert "contestants: got 'nobody'" in report
    else:
        assert report.startswith("Error: MissingPackage: --report draws plots: got no package matplotlib")
        assert f"; {how_to_install('bench')} (moe-rt docs errors#missingpackage)" in report
    status, message = results["toolkit"]
    assert status == (0 if extra == "cuda" else 1), message
    if extra != "cuda":
        assert f"; {how_to_install('cuda')} (moe-rt docs " in message
        status, compiled = results["gpucheck compile"]
        assert status == 1
        assert compiled == f"Error: CompileError: {message}\n"
    status, imported = results.get("transformers", (0, ""))
    assert status == (0 if extra in ("bench", "transformers") else 1), imported
    if status:
        assert "pip install '.[transformers]'" in imported.splitlines()[-1], imported


def test_the_environment_has_nothing_else(used: tuple[str, Results]) -> None:
    extra, results = used
    loaded = set(results["installed"][1].split())
    assert "torch" in loaded
    assert not loaded & {"pytest", "hypothesis"}
    assert ("matplotlib" in loaded) <= (extra in ("train", "bench"))


def test_kernels_come_with_the_package() -> None:
    """A wheel contains every header and kernel, since kernels are compiled on the machine that runs them."""
    installed = Path(_engine.__file__).parent / "cuda"
    sources = {
        path.relative_to(ROOT / "cuda")
        for part in ("protocol", "gpu")
        for path in (ROOT / "cuda" / part).rglob("*")
        if path.suffix in (".h", ".cu")
    }
    assert sources
    assert {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()} >= sources
