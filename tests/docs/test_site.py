"""Links of the site lead to existing pages and files, and its column is as wide as the sources' lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import site_links as hook  # noqa: E402
from site_links import BESIDE, site_links  # noqa: E402


def test_links_out_of_docs_become_names() -> None:
    text = "See [flat.h](../../cuda/protocol/flat/flat.h#L3) and [the layout](../../cuda/a.h), not [x](../errors.md#y)."
    assert site_links(text, "howto/layer.md") == (
        "See `cuda/protocol/flat/flat.h` and the layout (`cuda/a.h`), not [x](../errors.md#y)."
    )
    assert site_links("[layout.h](../cuda/layout.h)", "protocol.md") == "`cuda/layout.h`"
    assert site_links("[`x`](../a.py) ![y](y.png) [z](https://a.b/c)", "protocol.md") == (
        "`x` (`a.py`) ![y](y.png) [z](https://a.b/c)"
    )


def test_documents_beside_docs_are_pages() -> None:
    assert site_links("the [README](../README.md#use)", "index.md") == "the [README](project/readme.md#use)"
    assert site_links("[c](../../CONTRIBUTING.md)", "howto/layer.md") == "[c](../project/contributing.md)"
    text = "[a](docs/howto/ddp.md#x) ![b](docs/results.svg) [c](CHANGELOG.md) [d](#use) [e](bench/results/README.md)"
    assert site_links(text, "project/readme.md") == (
        "[a](../howto/ddp.md#x) ![b](../results.svg) [c](changelog.md) [d](#use) e (`bench/results/README.md`)"
    )
    assert all((ROOT / source).is_file() for source in BESIDE)


def test_blocks_stay_as_they_are() -> None:
    block = "```python\n# [a](../a.py)\n```"
    assert site_links(f"[a](../a.py)\n{block}\n[b](../b.py)", "x.md") == f"a (`a.py`)\n{block}\nb (`b.py`)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does: a broken link or a page that is not in the contents is an error."""
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    directory = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True))
    return directory


def test_the_site_has_installation_and_status(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in ("installation", "status", "stability", "project/readme", "project/changelog"):
        assert f'href="{page}/"' in start, page
        assert (site / page / "index.html").is_file()


def test_no_line_of_a_block_is_cut_off(site: Path) -> None:
    """The column has space for 120 characters in a window of 1400 pixels, and longer lines wrap."""
    style = (site / "site.css").read_text()
    assert "white-space: pre-wrap" in style
    assert "max-width: 76rem" in style
    for page in site.rglob("index.html"):
        assert 'site.css"' in page.read_text(), page
    assert "toc.integrate" in (ROOT / "mkdocs.yml").read_text()


def test_the_reference_is_whole(site: Path) -> None:
    buffer, layer = ((site / f"api/{name}/index.html").read_text() for name in ("buffer", "layer"))
    assert 'id="moe_rt.ThreadGroup.run"' in buffer
    assert 'id="moe_rt.ThreadGroup.all_gather"' in buffer, "inherited members are shown"
    assert 'id="moe_rt.MoELayer.forward"' in layer
    assert 'id="moe_rt.nn.router_losses.RouterAux"' in layer, "the second result of a call is shown"
    assert "../../howto/resume/" in layer, "docstrings name pages"
    errors = (site / "api/errors/index.html").read_text()
    assert "moe_rt.errors.PeerDead" in errors


def test_pages_that_docstrings_name_are_links_in_the_reference() -> None:
    class Page:
        url = "api/layer/"

        class file:
            src_uri = "api/layer.md"

    html = "see docs/howto/ddp.md, not <code>docs/x.md</code>"
    assert hook.on_page_content(html, page=Page) == (
        'see <a href="../../howto/ddp/">docs/howto/ddp.md</a>, not <code>docs/x.md</code>'
    )
