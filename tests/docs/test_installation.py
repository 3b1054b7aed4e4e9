"""Pages and messages agree with pyproject.toml on how to install moe_rt and which versions it supports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moe_rt.extras import how_to_install
from moe_rt.memory.ucx import OLDEST

tomllib = pytest.importorskip("tomllib")  # part of Python from 3.11

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLATION = (ROOT / "docs/installation.md").read_text()
STABILITY = (ROOT / "docs/stability.md").read_text()
HISTORY = ("CHANGELOG.md", "docs/log.md")  # past statements stay
FROM_AN_INDEX = re.compile(r"pip install(?: [^\s`'\"]+)* ['\"]?moe_rt\b(?!-)")


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    return subprocess.check_output(command, cwd=ROOT, text=True).splitlines()


def test_nothing_says_that_an_index_has_it() -> None:
    for name in tracked("*.md", "*.txt", "moe_rt/*.py", "*.ipynb", "Makefile"):
        if name not in HISTORY and (ROOT / name).exists():
            found = FROM_AN_INDEX.search((ROOT / name).read_text())
            assert found is None, f"{name}: {found}"
    assert FROM_AN_INDEX.search("pip install torch==2.11.* 'moe_rt[cuda]'")
    assert FROM_AN_INDEX.search("run `pip install moe_rt`")
    assert not FROM_AN_INDEX.search("pip install dist/moe_rt-*.whl")


def test_every_extra_is_explained() -> None:
    rows = re.findall(r"^\| (`.*`) \| .* \|$", INSTALLATION.partition("## Extras")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert named == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_messages_name_the_checkout_and_the_wheel(extra: str) -> None:
    said = how_to_install(extra)
    assert said.startswith(f"pip install '.[{extra}]' in moe_rt's checkout")
    assert f"'WHEEL[{extra}]'" in said
    assert "\n" not in said


def test_pages_that_name_an_extra_lead_to_the_installation() -> None:
    for name in tracked("README.md", "docs/*.md"):
        text = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        if "pip install '.[" in text and name not in (*HISTORY, "docs/installation.md"):
            assert "installation.md" in text, name


def oldest(package: str) -> str:
    extras = [text for texts in PROJECT["optional-dependencies"].values() for text in texts]
    (found,) = {
        spec.version
        for requirement in map(Requirement, [*PROJECT["dependencies"], *extras])
        for spec in requirement.specifier
        if requirement.name == package
    }
    return found


def test_versions_are_those_of_the_project() -> None:
    rows = dict(re.findall(r"^\| ([\w+, -]+) \| ([^|]*) \|", STABILITY.partition("## Versions")[2], re.MULTILINE))
    wheels = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert rows["Python"] == PROJECT["requires-python"].removeprefix(">=") == wheels[0]
    assert f"wheels for {wheels[0]} to {wheels[-1]}" in STABILITY
    assert rows["torch"] == oldest("torch")
    assert rows["Transformers"] == oldest("transformers")
    assert rows["UCX"] == ".".join(map(str, OLDEST))
    tested = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [f"| torch | {oldest('torch')} | {version} |" in STABILITY for version in tested] == [True]


@pytest.mark.parametrize("target", ["demo", "install"])
def test_make_says_what_it_fetches_before_it_does(target: str, tmp_path: Path) -> None:
    """`make` in a fresh checkout says what it downloads before it downloads it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "cuda").mkdir()
    done = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    (fetches,) = (i for i, line in enumerate(lines) if "pip install --quiet" in line)
    said = "\n".join(lines[:fetches])
    assert "That takes minutes." in said
    assert "2.7 GB with CUDA" in said
    assert "docs/installation.md" in said
    assert "2.7 GB" in INSTALLATION
