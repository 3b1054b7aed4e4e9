"""`moe-rt info` and `moe-rt docs` line by line, how packages are asked for, and what `moe_rt` offers."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import moe_rt
from moe_rt import cli, extras, info, pages
from moe_rt.errors import InvalidConfig, MissingPackage

FILES = {
    "/proc/cpuinfo": "processor\t: 0\nmodel name\t: A Processor: 9\nmodel name\t: Another\n",
    "/proc/meminfo": "MemFree:  5 kB\nMemTotal:       24 kB\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
HEAD = ["-C", str(Path(moe_rt.__file__).parent)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine of which everything is known; files can be taken away."""
    files = dict(FILES)

    def path(name: str) -> Any:
        if str(name).startswith(("/proc", "/sys")):
            return SimpleNamespace(read_text=lambda: files[name] if name in files else Path("/not/there").read_text())
        return Path(name)

    answers = {("rev-parse", "--short", "HEAD"): "abc123\n", ("status", "--porcelain", "--untracked-files=no"): ""}

    def run(command: list[str], **how: Any) -> Any:
        assert command[:3] == ["git", *HEAD]
        assert how == {"check": True, "capture_output": True, "text": True}
        return SimpleNamespace(stdout=answers[tuple(command[3:])])

    monkeypatch.setattr(info, "Path", path)
    monkeypatch.setattr(info.os, "sched_getaffinity", lambda pid: {3, 1, 2} if pid == 0 else set())
    monkeypatch.setattr(info.os, "getloadavg", lambda: (1.5, 2.5, 3.5))
    monkeypatch.setattr(info, "cache_bytes", lambda: (7 << 20) + 5)
    monkeypatch.setattr(info._engine, "isas", lambda: ["scalar", "avx2"])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("MOE_RT_ISA", raising=False)
    return files


def test_the_card_of_a_machine(machine: dict[str, str]) -> None:
    card = info.machine_card()
    taken = datetime.fromisoformat(card.pop("date"))
    assert abs((datetime.now(timezone.utc) - taken).total_seconds()) < 3600
    assert (taken.microsecond, taken.utcoffset()) == (0, datetime.now(timezone.utc).utcoffset())
    assert card == {
        "cpu": "A Processor: 9", "cores": 3, "cache_mib": 7, "memory": "24 kB", "huge_pages": "always [madvise] never",
        "load_average": 1.5, "kernel": platform.release(), "python": platform.python_version(),
        "torch": torch.__version__, "moe_rt": version("moe_rt"), "isa": "avx2", "commit": "abc123",
    }  # fmt: skip
    assert info.cores() == [1, 2, 3]
    machine.clear()
    machine["/proc/cpuinfo"] = "model\t: 3\n"
    card = info.machine_card()
    assert (card["cpu"], card["memory"], card["huge_pages"]) == ("unknown", "unknown", "unknown")


@pytest.mark.parametrize(("chosen", "isa"), [(None, "avx2"), ("auto", "avx2"), ("scalar", "scalar")])
@pytest.mark.usefixtures("machine")
def test_the_instruction_set(monkeypatch: pytest.MonkeyPatch, chosen: str | None, isa: str) -> None:
    if chosen is not None:
        monkeypatch.setenv("MOE_RT_ISA", chosen)
    assert info.isa() == isa


@pytest.mark.parametrize(("gpus", "named"), [([], "none"), (["A", "B"], "A, B")])
@pytest.mark.usefixtures("machine")
def test_what_a_machine_offers(monkeypatch: pytest.MonkeyPatch, gpus: list[str], named: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: gpus[i])
    monkeypatch.setattr(info.ucx, "describe", lambda: "a library")
    done = CliRunner().invoke(info.info, [])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "cpu          A Processor: 9"
    assert lines[-5:] == [
        "isas         scalar, avx2",
        f"GPUs         {named}",
        "heaps        shm (processes), ucx (processes on several hosts), threads (threads), nvshmem and gin "
        "(processes, a GPU each), loopback (threads, one GPU)",
        'heap="auto"  nvshmem for a process group with NCCL where torch sees a GPU, otherwise shm, or ucx on several '
        "hosts; loopback for a ThreadGroup on a GPU, otherwise threads",
        "UCX          a library",
    ]
    assert len(lines) == len(info.machine_card()) + 5


def test_reports_on_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are printed in turn, or as one list of JSON."""
    reports = [SimpleNamespace(to_json=lambda n=n: f'{{"n": {n}}}') for n in range(2)]
    asked: list[int] = []
    monkeypatch.setattr(info, "attach", lambda pid: asked.append(pid) or reports)
    monkeypatch.setattr(info, "show_report", lambda report: report.to_json())
    shown = CliRunner().invoke(info.info, ["--attach", "7"])
    assert (shown.exit_code, shown.output.splitlines()) == (0, ['{"n": 0}', '{"n": 1}'])
    listed = CliRunner().invoke(info.info, ["--attach", "7", "--json"])
    assert (listed.exit_code, json.loads(listed.output)) == (0, [{"n": 0}, {"n": 1}])
    assert len(listed.output.splitlines()) == 1
    assert asked == [7, 7]
    alone = CliRunner().invoke(info.info, ["--json"])
    assert (alone.exit_code, alone.output.splitlines()[-1]) == (2, "Error: --json needs --attach PID")

    def refuse(pid: int) -> None:
        raise InvalidConfig("pid: got 7")

    monkeypatch.setattr(info, "attach", refuse)
    refused = CliRunner().invoke(info.info, ["--attach", "7"])
    said = "Error: InvalidConfig: pid: got 7 (moe-rt docs errors#invalidconfig)\n"
    assert (refused.exit_code, refused.output) == (1, said)


def test_how_an_extra_is_installed() -> None:
    said = "pip install '.[train]' in moe_rt's checkout, or 'WHEEL[train]' with the path of its wheel"
    assert extras.how_to_install("train") == said


@pytest.mark.parametrize(("built", "extra"), [("12.8", "cuda12"), ("13.0", "cuda"), (None, "cuda"), ("120.1", "cuda")])
def test_the_extra_of_a_build_of_torch(monkeypatch: pytest.MonkeyPatch, built: str | None, extra: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    assert extras.cuda_extra() == extra


def test_a_package_that_is_missing() -> None:
    extras.require("torch", "train", "a plot")
    with pytest.raises(MissingPackage) as raised:
        extras.require("not_a_package", "train", "a plot")
    said = f"a plot: got no package not_a_package, expected one; {extras.how_to_install('train')}"
    assert str(raised.value) == f"{said} (moe-rt docs errors#missingpackage)"


def test_names_of_the_package() -> None:
    assert {*moe_rt.__all__, "__version__"} <= set(dir(moe_rt))
    assert dir(moe_rt) == sorted(set(dir(moe_rt)))
    for name in moe_rt.__all__:
        assert getattr(moe_rt, name).__name__ == name
    assert moe_rt.nn.router.Router.__name__ == "Router"
    for name in ("nothing", "cli"):  # a module is imported by its own name only
        vars(moe_rt).pop(name, None)
        with pytest.raises(AttributeError, match=f"^module 'moe_rt' has no attribute '{name}'$"):
            getattr(moe_rt, name)


def test_a_checkout_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    find, spec = importlib.util.find_spec, importlib.util.find_spec("moe_rt")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "moe_rt._engine" else find(name))
    expected = (
        f"got {HEAD[1]} without its compiled engine, expected an installed moe_rt; in a checkout run `make install`"
    )
    with pytest.raises(MissingPackage, match=expected):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_commands() -> None:
    """Each is found by its name; an unknown one is refused, and nothing else is imported for that."""
    context = click.Context(cli.main)
    names = cli.main.list_commands(context)
    expected = ("bench", "calibrate", "chaos", "compile", "diff", "docs", "gpucheck", "info", "nodes", "on-cpu", "plan")
    assert tuple(names) == expected
    for name in names:
        command = cli.main.get_command(context, name)
        assert command is not None
        assert command.name == name
    assert cli.main.get_command(context, "nothing") is None
    done = CliRunner().invoke(cli.main, ["--version"])
    assert done.output.split()[-1] == version("moe_rt")


PAGE = """# Title

## A [link](to.md) and `code`, twice!
text

  ```x
## no heading
```

### Deeper ##
more

~~~~
# no
~~~
```
~~~~
## A link and code twice

## A link and code twice
end
####### seven
#tight
"""
ANCHORS = ["title", "a-link-and-code-twice", "deeper", "a-link-and-code-twice-1", "a-link-and-code-twice-2"]


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/howto").mkdir(parents=True)
    (tmp_path / "docs/errors.md").write_text(PAGE + "\n\n")
    (tmp_path / "docs/howto/a_longer_name.md").write_text("# How to\n")
    (tmp_path / "docs/other.txt").write_text("# None\n")
    monkeypatch.setattr(pages, "HERE", tmp_path)


@pytest.mark.usefixtures("documents")
def test_sections_of_a_page() -> None:
    lines = PAGE.splitlines()
    parts = {"title": (0, 23), ANCHORS[1]: (2, 17), "deeper": (9, 17), ANCHORS[3]: (17, 19), ANCHORS[4]: (19, 23)}
    for anchor, (begin, end) in parts.items():
        assert pages.read(f"errors#{anchor}") == "\n".join(lines[begin:end]).rstrip("\n")
    assert pages.read("errors") == PAGE.rstrip("\n")
    with pytest.raises(InvalidConfig) as raised:
        pages.read("docs/errors.md#nothing")
    expected = f"section of errors: got 'nothing', expected one of {', '.join(ANCHORS)}"
    assert str(raised.value).startswith(expected + " (")


@pytest.mark.usefixtures("documents")
def test_pages_are_listed_in_columns() -> None:
    assert pages.list_pages() == "errors               Title\nhowto/a_longer_name  How to"
    done = CliRunner().invoke(pages.docs, [])
    assert (done.exit_code, done.output) == (0, pages.list_pages() + "\n")
    done = CliRunner().invoke(pages.docs, ["nowhere"])
    said = "Error: InvalidConfig: page: got 'nowhere', expected one that `moe-rt docs` lists"
    assert (done.exit_code, done.output.split(" (moe-rt")[0]) == (1, said)
    assert os.linesep not in done.output.rstrip("\n")


@pytest.mark.usefixtures("documents")
def test_pages_are_read_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are UTF-8, also where the encoding of the system is another."""

    def read_text(path: Path, encoding: str = "latin-1") -> str:
        return path.read_bytes().decode(encoding)

    (tmp_path / "docs/errors.md").write_bytes("# Für\n".encode())
    monkeypatch.setattr(Path, "read_text", read_text)
    assert pages.read("errors") == "# Für"
    assert "Für" in pages.list_pages()
