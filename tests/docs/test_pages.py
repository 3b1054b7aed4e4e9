"""`moe-rt docs` shows every page and every section, and messages name pages only by this command."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_rt import pages
from moe_rt.cli import main
from moe_rt.errors import InvalidConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from check_tree import headings  # noqa: E402

NAMES = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["docs", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", NAMES)
def test_every_page_and_section(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    for link in (name, f"docs/{name}.md", f"../{name}.md"):
        assert pages.read(link) == text.rstrip("\n")
    for section in headings(text):
        part = pages.read(f"{name}#{section}")
        assert part.startswith("#")
        assert part in text


def test_a_section_ends_with_the_next_of_its_level() -> None:
    part = pages.read("errors#peerdead")
    assert part.startswith("## PeerDead\n")
    assert "\n## " not in part
    assert "\n## " in pages.read("errors#errors")


def test_a_comment_in_a_block_is_no_heading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    section = "## A\n\n```bash\n# A comment.\n~~~\ntrue\n```\n\nText."
    (tmp_path / "docs/errors.md").write_text(f"# Errors\n\n{section}\n\n## A\n\nMore.\n")
    monkeypatch.setattr(pages, "HERE", tmp_path)
    assert pages.read("errors#a") == section
    assert pages.read("errors#a-1") == "## A\n\nMore."


def test_all_pages_are_listed() -> None:
    lines = shown().splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert "errors" in NAMES
    (line,) = (line for line in lines if line.startswith("errors "))
    assert line.split() == ["errors", "Errors"]


@pytest.mark.parametrize("link", ["nowhere", "errors#nothing", "../../etc/passwd", "/etc/passwd", "", "#peerdead", "."])
def test_what_is_not_there_is_refused(link: str) -> None:
    with pytest.raises(InvalidConfig, match=r"got .*, expected one"):
        pages.read(link)
    done = CliRunner().invoke(main, ["docs", link])
    assert (done.exit_code, done.output.count("\n")) == (1, 1)


def test_an_installed_package_has_pages_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moe_rt/docs").mkdir(parents=True)
    (tmp_path / "moe_rt/docs/errors.md").write_text("# Errors of a wheel\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/errors.md").write_text("# Somebody else's\n")
    monkeypatch.setattr(pages, "HERE", tmp_path / "moe_rt")
    assert shown("errors") == "# Errors of a wheel\n"


def messages(path: Path) -> list[str]:
    """Return the string constants of a module except its docstrings."""
    module = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(module) if hasattr(node, "body") and isinstance(node.body, list)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    texts = [node for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in texts if id(node) not in docstrings]


def test_messages_name_pages_by_the_command_that_shows_them() -> None:
    """Messages name pages by the command, since a wheel does not have the paths of the checkout."""
    for path in (ROOT / "moe_rt").rglob("*.py"):
        for text in messages(path):
            if not text.startswith("python -m moe_rt."):  # a command that writes a table into a page is for checkouts
                assert not re.search(r"docs/[\w/]+\.md|README", text), f"{path}: {text}"
            for link in re.findall(r"moe-rt docs ([\w/]+(?:#\w+)?)", text):
                if not link.endswith("#"):
                    assert pages.read(link)
