"""On the site, links to sources become names of files, and all other links stay as they are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from site_links import plain_links


def test_links_out_of_docs_become_names() -> None:
    text = (
        "See [layout.h](../cuda/protocol/core/layout.h#L3) and [the layout](../../cuda/a.h), not [x](../errors.md#y).\n"
    )
    assert plain_links(text, "howto/layer.md") == (
        "See [layout.h](../cuda/protocol/core/layout.h#L3) and the layout (`cuda/a.h`), not [x](../errors.md#y).\n"
    )
    assert plain_links("[layout.h](../cuda/layout.h)", "protocol.md") == "`cuda/layout.h`"
    assert plain_links("[`x`](../a.py) ![y](../y.png)", "protocol.md") == "`x` (`a.py`) ![y](../y.png)"


def test_blocks_stay_as_they_are() -> None:
    block = "```python\n# [a](../a.py)\n```"
    assert plain_links(f"[a](../a.py)\n{block}\n[b](../b.py)", "x.md") == f"a (`a.py`)\n{block}\nb (`b.py`)"
