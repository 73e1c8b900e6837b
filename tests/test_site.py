"""The documentation site: it builds strictly, loads nothing from elsewhere, its links lead on."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 100.0
# What a browser loads by itself, and by which attribute.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "srcset"}


def hook() -> ModuleType:
    """The module that mkdocs loads by its path."""
    spec = importlib.util.spec_from_file_location(
        "repository_links", ROOT / "deploy" / "site" / "repository_links.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make site` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Elements(HTMLParser):
    """The elements of a page: their names and attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))


@pytest.mark.long
def test_every_page_of_the_folder_is_in_the_site(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}


@pytest.mark.long
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = [
        (page.name, attributes[LOADED[tag]])
        for page in site.glob("*.html")
        for tag, attributes in Elements(page).found
        if attributes.get(LOADED.get(tag, ""), "").startswith(("http:", "https:", "//"))
    ]
    assert loaded == []


@pytest.mark.long
def test_style_sheets_load_nothing_from_elsewhere(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    assert [each for each in sheets if re.search(r"url\(.?(https?:)?//", each.read_text())] == []


@pytest.mark.long
def test_the_theme_asks_no_server_about_the_repository(site: Path) -> None:
    """It would ask GitHub for the number of stars where it shows the repository in its head."""
    components = {
        attributes["data-md-component"]
        for page in site.glob("*.html")
        for _, attributes in Elements(page).found
        if "data-md-component" in attributes
    }
    assert "search" in components
    assert "source" not in components


@pytest.mark.long
def test_links_out_of_the_folder_are_addresses_of_the_repository(site: Path) -> None:
    links = [
        attributes["href"]
        for page in site.glob("*.html")
        for tag, attributes in Elements(page).found
        if tag == "a" and "href" in attributes
    ]
    assert f"{hook().REPOSITORY}/blob/main/examples/train_ddp.py" in links
    assert [link for link in links if link.startswith("../")] == []


@pytest.mark.long
def test_tables_of_pages_are_tables_of_the_site(site: Path) -> None:
    """Markdown has many dialects: a table that the repository shows may be text on the site."""
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        written = len(re.findall(r"^\|[\s:|-]*-[\s:|-]*\|$", text, re.MULTILINE))
        shown = sum(tag == "table" for tag, _ in Elements(site / f"{page.stem}.html").found)
        assert shown == written, page.name


class TestRewriting:
    @pytest.fixture
    def rewrite(self) -> ModuleType:
        return hook()

    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            ("[a](../README.md)", "blob/main/README.md"),
            ("[a](../README.md#performance)", "blob/main/README.md#performance"),
            ("[a](../deploy/docker)", "tree/main/deploy/docker"),
        ],
    )
    def test_a_link_to_a_file_becomes_its_address(
        self, rewrite: ModuleType, written: str, meant: str
    ) -> None:
        assert rewrite._rewritten(written, "page.md") == f"[a]({rewrite.REPOSITORY}/{meant})"

    def test_a_link_to_a_page_stays(self, rewrite: ModuleType) -> None:
        assert rewrite._rewritten("[a](cli.md#json)", "page.md") == "[a](cli.md#json)"

    def test_a_link_to_nothing_fails_the_build(self, rewrite: ModuleType) -> None:
        with pytest.raises(Exception, match=r"page.md links to \.\./gone.py, which is not in"):
            rewrite._rewritten("[a](../gone.py)", "page.md")
