"""The documentation site: it builds, its links lead somewhere, and a browser loads nothing for it from another host."""

import functools
import http.server
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

import capflow
import capflow.errors
import capflow.testing
from tests.kit.sources import ROOT

START = ["install.html", "first-capture.html", "first-steering.html", "tutorial.html", "architecture.html"]
"""The pages that a reader meets first, in this order."""

PICTURES = 5
"""How many pictures the architecture page has."""

LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
"""By tag, the attribute with an address that a browser loads by itself; beside these, `link`."""


class Link(NamedTuple):
    """An address in a page. loaded: the browser loads it by itself."""

    page: Path
    target: str
    loaded: bool


class Reader(HTMLParser):
    """Collects a page's ids, its links, and the links of its navigation in their order."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.page = page
        self.ids: set[str] = set()
        self.links: list[Link] = []
        self.navigation: list[str] = []
        # The depth in `nav` elements, from the primary navigation on.
        self._depth = 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "nav" and (self._depth or "md-nav--primary" in values.get("class", "")):
            self._depth += 1
        if values.get("href") and tag in ("a", "link"):
            self.links.append(Link(self.page, values["href"], loaded=tag == "link"))
            if tag == "a" and self._depth:
                self.navigation.append(values["href"])
        if tag in LOADING and values.get(LOADING[tag]):
            self.links.append(Link(self.page, values[LOADING[tag]], loaded=True))

    def handle_endtag(self, tag):
        if tag == "nav" and self._depth:
            self._depth -= 1


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, every warning an error; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Reader(path) for path in sorted(site.rglob("*.html"))}


def lead_nowhere(site, pages):
    """Return the links of a site that lead to no file, no anchor, or to an address of no known form."""
    wrong = []
    for link in (link for reader in pages.values() for link in reader.links):
        target = urlsplit(link.target)
        if target.scheme or target.netloc:
            if target.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", target.netloc):
                wrong.append(link)
            continue
        path = unquote(target.path)
        there = site / path.lstrip("/") if path.startswith("/") else (link.page.parent / path).resolve()
        if not path:
            there = link.page
        elif there.is_dir():
            there /= "index.html"
        fragment = unquote(target.fragment)
        if not there.is_file() or (fragment and there.suffix == ".html" and fragment not in pages[there].ids):
            wrong.append(link)
    return wrong


def test_every_link_and_anchor_leads_somewhere(site, pages):
    assert sum(len(reader.links) for reader in pages.values()) > 1000
    assert lead_nowhere(site, pages) == []


@pytest.mark.parametrize(
    "target", ["gone.html", "page.html#gone", "#gone", "http://example.org/", "https://localhost/", "javascript:x()"]
)
def test_a_wrong_link_is_found(tmp_path, target):
    page = tmp_path / "page.html"
    page.write_text(f'<h1 id="here">A page</h1><a href="#here">good</a><a href="{target}">bad</a>', encoding="utf-8")
    assert lead_nowhere(tmp_path, {page: Reader(page)}) == [Link(page, target, loaded=False)]


def test_nothing_is_loaded_from_another_host(site, pages):
    loaded = [link for reader in pages.values() for link in reader.links if link.loaded]
    assert loaded
    assert [link for link in loaded if urlsplit(link.target).netloc] == []
    for style in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text(encoding="utf-8"))
        assert [address for address in addresses if urlsplit(address).netloc] == [], style


def test_every_page_is_in_the_navigation(site, pages):
    written = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    there = pages[site / "index.html"].navigation
    assert written - set(there) == set()
    built = {path.relative_to(site).as_posix() for path in pages}
    assert built - set(there) == {"404.html"}


def test_the_navigation_begins_in_the_order_of_a_reader(site, pages):
    there = [link for link in pages[site / "index.html"].navigation if not link.startswith("#")]
    first, *then = dict.fromkeys(there)
    assert first == "index.html"
    assert then[: len(START)] == START


def errors():
    """Return the names of capflow's errors."""
    classes = inspect.getmembers(capflow.errors, inspect.isclass)
    return {name for name, kind in classes if kind.__module__ == "capflow.errors"}


def test_every_public_name_is_in_the_reference(site, pages):
    public = {
        *(f"capflow.{name}" for name in set(capflow.__all__) - errors()),
        *(f"capflow.errors.{name}" for name in errors()),
        *(f"capflow.testing.{name}" for name in capflow.testing.__all__),
    }
    described = {name for path, reader in pages.items() if path.parent == site / "api" for name in reader.ids}
    assert public - described == set(), "docs/api has no section for these"


@pytest.fixture(scope="module")
def fields():
    """Return the module that formats docstrings."""
    spec = importlib.util.spec_from_file_location("docs_fields", ROOT / "docs" / "theme" / "fields.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parameters_of_a_docstring_become_a_list(fields):
    text = "Do it.\n\npath: the file.\n    It may exist.\nkeep: how many\nof each.\n\nRaises: nothing."
    listed = fields.listed(text, {"path", "keep"})
    assert listed.split("\n\n") == [
        "Do it.",
        "\n* `path`: the file.\n  It may exist.\n* `keep`: how many\n  of each.",
        "Raises: nothing.",
    ]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a log."""

    def log_message(self, *args):
        pass


@pytest.fixture
def address(site):
    """Serve the site; return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.browser
def test_pictures_are_drawn_without_another_host(address):
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "make system installs Chromium"
    others = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_context(color_scheme=scheme).new_page()
            page.on("request", lambda request: others.append(request.url))
            page.goto(f"{address}architecture.html")
            page.wait_for_function(f"document.querySelectorAll('div.mermaid').length === {PICTURES}", timeout=30_000)
            heights = [picture.bounding_box()["height"] for picture in page.query_selector_all("div.mermaid")]
            assert all(height > 200 for height in heights), heights
        browser.close()
    assert [url for url in others if not url.startswith(address)] == []
