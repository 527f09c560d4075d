"""The documentation as a site: it builds without a warning, whole, and asks nobody for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import typer
from browser import PROGRAM, Browser, chromium

from corefed.commands import cli
from corefed.methods.registry import METHODS, config_class
from corefed.settings.fields import list_settings
from corefed.settings.run import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a page missing from the navigation, a dead link or anchor, an unreadable formula
    or docstring ends the build."""
    folder = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Links that a reader may follow are not meant: what a browser loads by itself is."""
    loaded = re.compile(
        r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*"
        r"|<link\b[^>]*\bhref=\"?(?:https?:)?//[^>]*"
        r"|@import[^;]*|url\(\s*['\"]?(?:https?:)?//[^)]*"
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 20
    found = {file.name: loaded.findall(file.read_text(encoding="utf-8")) for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_formulas_are_mathml(site: Path) -> None:
    text = (site / "method.html").read_text(encoding="utf-8")
    assert text.count("<math") > 50
    assert "arithmatex" not in text and "$$" not in text
    for number in range(1, 10):
        assert f"({number})</mtext>" in text, f"Eq. {number}"


def test_reference_is_whole(site: Path) -> None:
    """Every command with every option, every setting of every method."""
    text = (site / "reference" / "command-line.html").read_text(encoding="utf-8")

    def check(words: str, command: typer.core.TyperCommand) -> None:
        for name, below in getattr(command, "commands", {}).items():
            check(f"{words} {name}", below)
        if not hasattr(command, "commands"):
            part = text.partition(f'<h2 id="{words.replace(" ", "-")}"')[2].partition("<h2")[0]
            options = {
                option for each in command.params for option in each.opts if option[0] == "-"
            }
            assert [option for option in options if option not in part] == [], words

    check("corefed", typer.main.get_command(cli.app))
    text = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    for cls in (Run, *map(config_class, METHODS)):
        assert [
            each.name for each in list_settings(cls) if f"<code>{each.name}</code>" not in text
        ] == []


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


CONTRAST = """(() => {
    const link = document.querySelector('.md-content article p a:not(.headerlink)');
    const luminance = colour => {
        const canvas = document.createElement('canvas').getContext('2d');
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255).map(
            v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    link.style.transition = 'none';
    const own = luminance(getComputedStyle(link).color);
    const ground = luminance(getComputedStyle(document.body).backgroundColor);
    return (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05);
})()"""
"""The contrast of a link against the page."""


def _search(browser: Browser) -> None:
    """Type two words into the search, and wait until it has found pages."""
    browser.evaluate(
        "{const box = document.querySelector('.md-search__input'); box.focus();"
        "box.value = 'hard thresholding';"
        "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); 0}"
    )
    browser.until("/matching/.test(document.querySelector('.md-search-result__meta').innerText)")


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_search_in_pages_opened_as_files(site: Path) -> None:
    with chromium() as browser:
        browser.call("Page.navigate", url=(site / "index.html").as_uri())
        browser.until("document.readyState === 'complete'")
        _search(browser)
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_in_a_browser(address: str) -> None:
    """Formulas are drawn, the search finds, no error is logged, nobody else is asked."""
    with chromium() as browser:
        browser.width(1200)
        browser.call("Page.navigate", url=f"{address}/method.html")
        browser.until(
            "document.readyState === 'complete' && document.querySelector('math') !== null"
        )
        flat = "[...document.querySelectorAll('math')].filter(m => m.clientHeight < 5).length"
        assert browser.evaluate(flat) == 0
        _search(browser)
        assert browser.evaluate(CONTRAST) >= 4.5  # what WCAG 2 asks for text
        browser.evaluate("document.body.setAttribute('data-md-color-scheme', 'slate')")
        assert browser.evaluate(CONTRAST) >= 4.5
        browser.width(390)
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith((address, "data:"))] == []
