"""A hook of mkdocs: links that leave docs/ become plain names of files, since the site has no copy of the sources.

tools/check_tree.py holds that those links point at files of the tree; mkdocs in strict mode holds all others.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"^([ \t]*(`{3,}|~{3,}).*?^[ \t]*\2[ \t]*)$", re.DOTALL | re.MULTILINE)


def plain_links(markdown: str, page: str) -> str:
    """`markdown` of the page docs/`page`, where links out of docs/ name the file that they point at."""

    def name(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[2]))
        if target.startswith("docs/") or target == "docs":
            return match[0]
        text = match[1].strip("`")
        return f"`{target}`" if target.endswith(text) else f"{match[1]} (`{target}`)"

    parts = FENCED.split(markdown)  # text, block, its fence, text, ...
    return "".join(LINK.sub(name, part) if i % 3 == 0 else part for i, part in enumerate(parts) if i % 3 != 2)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return plain_links(markdown, page.file.src_uri)
