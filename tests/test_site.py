"""The site: it builds without a warning, needs nothing from the network, and its links work."""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import neumann
from tests.support.browser import open_page, start_browser

pytest.importorskip("mkdocs")  # part of the extra `dev`

ROOT = Path(__file__).parent.parent
# What a browser loads by itself. A link that the reader may follow can lead anywhere.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# Not loaded: the address of the page and of its neighbors.
RELATIONS = {"canonical", "prev", "next"}

BASES = re.compile(r'<p class="doc doc-class-bases">(.*?)</p>', re.DOTALL)
SIGNATURE = re.compile(r'<div class="[^"]*doc-signature[^"]*">(.*?)</div>', re.DOTALL)

RESULTS = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
WIDTHS = """return [...document.querySelectorAll('.md-typeset__scrollwrap')].map(
    wrap => [wrap.clientWidth, wrap.scrollWidth, wrap.innerText.slice(0, 40)])"""
SENT = "Network.requestWillBeSent"

pytestmark = pytest.mark.slow


class Links(HTMLParser):
    """Collects what a page loads, where it leads, and which anchors it has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.images: list[dict[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors.update(value for name in ("id", "name") if (value := found.get(name)))
        url = found.get(LOADED.get(tag, ""))
        if url and not RELATIONS & set((found.get("rel") or "").split()):
            self.loaded.append(url)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "img":
            self.images.append(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", folder]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Links(path.read_text()) for path in site.glob("**/*.html")}


def list_texts(pattern, page):
    """What a reader sees of each match, with single spaces."""
    return [" ".join(re.sub("<[^>]+>", "", found).split()) for found in pattern.findall(page)]


def test_it_has_its_pages(site):
    nav = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert len(nav) > 25
    for name in nav:
        assert (site / name.replace(".md", ".html")).is_file(), name


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        for url in page.loaded:
            assert not urlsplit(url).netloc, f"{path.name} loads {url}"
    for style in site.glob("**/*.css"):
        for url in re.findall(r"url\(([^)]*)\)|@import\s+([^;]*)", style.read_text()):
            assert "//" not in "".join(url).split(",")[0], f"{style.name} loads {url}"


def test_links_and_anchors_lead_somewhere(pages):
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served for any address, so its links start at the site's
        for url in {*page.links, *page.loaded}:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.name} leads to {url}"
            if parts.fragment and target in pages:
                anchors = pages[target].anchors
                assert unquote(parts.fragment) in anchors, f"{path.name} leads to {url}"


def test_images_have_alternative_text(pages):
    for path, page in pages.items():
        for image in page.images:
            assert image.get("alt"), f"{path.name}: {image.get('src')}"


def test_it_can_be_searched_from_a_folder(site, tmp_path):
    """A browser that opens the files themselves finds pages, and loads nothing else."""
    with start_browser(tmp_path) as browser:
        browser.get((site / "index.html").as_uri() + "?q=recalibrate_batchnorm")
        found: list[str] = []
        end = time.monotonic() + 30
        while not found and time.monotonic() < end:
            found = browser.execute_script(RESULTS)
            time.sleep(0.1)
        messages = [entry["message"] for entry in browser.get_log("performance")]
    assert any("api/optimizer.html" in link for link in found)
    requests = [json.loads(message)["message"] for message in messages]
    loaded = [r["params"]["request"]["url"] for r in requests if r["method"] == SENT]
    assert [url for url in loaded if url.startswith(("http:", "https:", "ws:", "wss:"))] == []


def test_colors_follow_the_system_until_the_reader_chooses(site, tmp_path):
    shown = "return document.body.getAttribute('data-md-color-scheme')"
    offered = "return [...document.querySelectorAll('.md-option + label')].map(l => l.title)"
    click = "document.querySelector('.md-option + label:not([hidden])').click()"
    with start_browser(tmp_path) as browser:
        for dark, scheme in ((True, "slate"), (False, "default")):
            open_page(browser, site / "index.html", dark=dark)
            assert browser.execute_script(shown) == scheme
        assert browser.execute_script(offered) == [
            "Switch to light",
            "Switch to dark",
            "Switch to the system's colors",
        ]
        chosen = []
        for _ in range(3):
            browser.execute_script(click)
            chosen.append(browser.execute_script(shown))
        assert chosen == ["default", "slate", "default"]  # the last one is the system's


@pytest.mark.parametrize("name", ["index", "choosing-a-form", "contests"])
def test_tables_fit_on_a_small_screen(site, tmp_path, name):
    """Of a laptop. On a phone they scroll."""
    with start_browser(tmp_path) as browser:
        open_page(browser, site / f"{name}.html", width=1280)
        tables = browser.execute_script(WIDTHS)
    assert tables
    assert [table for table in tables if table[1] > table[0]] == []


def test_the_reference_shows_docstrings(site):
    page = (site / "api/optimizer.html").read_text()
    assert "the learning rate η, a float or a 0-d tensor" in page
    assert ":meth:" not in page
    assert "::<" not in page
    fields = (site / "api/spectrum.html").read_text()
    assert "the Ritz value at this end; it lies inside the spectrum" in fields


def test_the_reference_shows_the_values_of_defaults(site):
    """Not the names of constants in the source, such as `lr=LR`."""
    signatures = {
        path.name: unescape(re.sub("<[^>]+>", "", "".join(SIGNATURE.findall(path.read_text()))))
        for path in site.glob("api/*.html")
    }
    recipe = inspect.signature(neumann.large_batch).parameters
    assert f"lr: float | Tensor = {recipe['lr'].default}," in signatures["optimizer.html"]
    assert f"ramp: float = {recipe['ramp'].default}," in signatures["optimizer.html"]
    auto = recipe["weight_decay"].default
    assert f'weight_decay: float | Literal["auto"] = "{auto}",' in signatures["optimizer.html"]
    for name, text in signatures.items():
        assert not re.findall(r"\w+: .*= *((?:\w+\.)*[A-Z][A-Z_]+)\b", text), name


def test_the_reference_shows_no_private_base(site):
    """But the signature that a class inherits from one."""
    pages = {path.name: unescape(path.read_text()) for path in site.glob("api/*.html")}
    bases = {name: list_texts(BASES, page) for name, page in pages.items()}
    assert "Bases: LRScheduler" in bases["schedules.html"]
    assert not [text for found in bases.values() for text in found if re.search(r"\b_", text)]
    inherited = next(t for t in list_texts(SIGNATURE, pages["schedules.html"]) if "Linear" in t)
    assert "total_steps: int," in inherited


def test_formulas_need_no_script(site):
    assert "<math" in (site / "how-it-works.html").read_text()
