"""mkdocs hook: documents outside docs/ become pages of the site, and links between them and docs/ lead there.

Links to any other file become plain file names, since the site has no copy of the sources. tools/check_tree.py checks
that all links point at files of the tree; mkdocs in strict mode checks the links within the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Pages on the site. A README would be an index elsewhere, and two pages are about security.
BESIDE = {f"{name}.md": f"project/{name.lower()}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")}
SOURCES = {page: source for source, page in BESIDE.items()}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]+)\]\((?!\w+:|#)(?P<link>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"^([ \t]*(`{3,}|~{3,}).*?^[ \t]*\2[ \t]*)$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"(?<![\w/.>\"])docs/((?:\w+/)*\w+)\.md")


def site_links(markdown: str, page: str) -> str:
    """Return `markdown` of the site's page `page`, with links to other pages and plain names of all other files."""
    source = SOURCES.get(page, f"docs/{page}")

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["link"]))
        if target in BESIDE or target.startswith("docs/"):
            there = posixpath.relpath(BESIDE.get(target, target.removeprefix("docs/")), posixpath.dirname(page) or ".")
            return f"{match['image']}[{match['text']}]({there}{match['anchor'] or ''})"
        text = match["text"].strip("`")
        return f"`{target}`" if target.endswith(text) else f"{match['text']} (`{target}`)"

    parts = FENCED.split(markdown)  # text, block, its fence, text, ...
    return "".join(LINK.sub(lead, part) if i % 3 == 0 else part for i, part in enumerate(parts) if i % 3 != 2)


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return site_links(markdown, page.file.src_uri)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Docstrings name pages as files; in the site's API reference, make each a link."""
    if not page.file.src_uri.startswith("api/"):
        return html
    up = "../" * page.url.count("/")
    return NAMED.sub(lambda match: f'<a href="{up}{match[1]}/">{match[0]}</a>', html)
