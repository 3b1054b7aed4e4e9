"""The command `moe-rt docs`: shows a page of the documents in the package, or one section of it."""

from __future__ import annotations

import re
from pathlib import Path

import click

from moe_rt.errors import InvalidConfig

HERE = Path(__file__).parent
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
HEADING = re.compile(r"(#{1,6})\s+(.+?)[\s#]*$")


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Show PAGE of the documents, or one section of it: `moe-rt docs errors#peerdead`. Without PAGE, list them all.

    PAGE may also be a link copied from a page.
    """
    try:
        click.echo(list_pages() if page is None else read(page))
    except InvalidConfig as error:
        raise click.ClickException(f"InvalidConfig: {error}") from error


def directory() -> Path:
    """Return the directory of the pages: in the package, or next to it in a checkout."""
    return next(path for path in (HERE / "docs", HERE.parent / "docs") if (path / "errors.md").is_file())


def list_pages() -> str:
    """Return every page and its title, one per line."""
    found = {path.relative_to(directory()).with_suffix("").as_posix(): path for path in directory().rglob("*.md")}
    width = max(map(len, found))
    titles = {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in found.items()}
    return "\n".join(f"{name:{width}}  {titles[name]}" for name in sorted(found))


def read(link: str) -> str:
    """Return the page or section that `link` names: `errors`, `docs/errors.md#peerdead`, `../errors.md`.

    Raises:
        InvalidConfig: the page, or the section of it, does not exist.
    """
    page, _, section = link.partition("#")
    name = re.sub(r"^(\.\./|docs/)+", "", page).removesuffix(".md")
    path = directory() / f"{name}.md"
    if not re.fullmatch(r"\w+(/\w+)*", name) or not path.is_file():
        raise InvalidConfig(f"page: got {link!r}, expected one that `moe-rt docs` lists")
    text = path.read_text(encoding="utf-8")
    if not section:
        return text.rstrip("\n")
    lines, headings = text.splitlines(), _headings(text)
    for place, (begin, level, anchor) in enumerate(headings):
        if anchor == section:
            after = (line for line, other, _ in headings[place + 1 :] if other <= level)
            return "\n".join(lines[begin : next(after, len(lines))]).rstrip("\n")
    anchors = ", ".join(anchor for _, _, anchor in headings)
    raise InvalidConfig(f"section of {name}: got {section!r}, expected one of {anchors}")


def _headings(text: str) -> list[tuple[int, int, str]]:
    """Return line, level and anchor of each heading. Anchors are spelled as on GitHub; the second `x` is `x-1`."""
    found: list[tuple[int, int, str]] = []
    titles: list[str] = []
    fence = ""
    for line, words in enumerate(text.splitlines()):
        mark = FENCE.match(words)
        if mark and not fence:
            fence = mark[1]
        elif mark and words.strip().startswith(fence):
            fence = ""
        elif not fence and (heading := HEADING.match(words)):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[2])
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            before = titles.count(anchor)
            titles.append(anchor)
            found.append((line, len(heading[1]), f"{anchor}-{before}" if before else anchor))
    return found
