"""The page of `corefed report` in a browser: drawing, views, tables, downloads, phone and paper."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path

import pytest
from browser import OVERFLOW, Browser
from PIL import Image
from report_pages import NASTY, Made, Page

pytest.importorskip("altair", reason="the report's extra is not installed")
pytest.importorskip("vl_convert", reason="the report's extra is not installed")

TABLE = "#comparison > .scroll > table.sortable"
BY_METRIC = "#comparison > details table.sortable"
FIRST = f"[...document.querySelectorAll('{TABLE} tbody tr')].map(r => r.cells[0].textContent)"


@pytest.mark.parametrize("which", ["page", "many"])
def test_page_draws_its_charts_and_nothing_else(made: Made, browser: Browser, which: str) -> None:
    path = getattr(made, which)
    browser.media("light")
    browser.width(1200)
    browser.open(path)
    drawn = "[...document.querySelectorAll('[data-chart]')].filter(c => c.querySelector('svg'))"
    assert browser.evaluate(f"{drawn}.length") == len(Page(path.read_text()).specs)
    marks = "c => c.querySelectorAll('svg path, svg rect').length > 2"
    assert browser.evaluate(f"{drawn}.every({marks})")
    assert browser.errors == []
    assert [r for r in browser.requests if not r.startswith("data:")] == [path.as_uri()]
    assert browser.evaluate(OVERFLOW) == 0
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.picture(whole=False).startswith(b"\x89PNG")


def test_scripts_in_names_do_not_run(made: Made, browser: Browser) -> None:
    browser.open(made.page)
    said = "document.querySelector('#clients table').textContent"
    assert NASTY in browser.evaluate(said) and browser.errors == []


@pytest.mark.parametrize("which", ["page", "many"])
def test_phone_has_no_sideways_scrolling(made: Made, browser: Browser, which: str) -> None:
    browser.width(390)
    browser.open(getattr(made, which))
    browser.evaluate("document.querySelectorAll('.view').forEach(v => v.hidden = false)")
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate(OVERFLOW) == 0
    inside = "s => s.getBoundingClientRect().right <= 390"
    assert browser.evaluate(f"[...document.querySelectorAll('.chart svg')].every({inside})")
    assert browser.errors == []
    browser.width(1200)


@pytest.mark.parametrize("table", [TABLE, BY_METRIC], ids=["runs", "by metric"])
def test_comparison_sorts_by_every_column(made: Made, browser: Browser, table: str) -> None:
    browser.width(1200)
    browser.open(made.many)
    assert browser.evaluate(f"document.querySelectorAll('{table}').length") == 1
    rows = f"[...document.querySelectorAll('{table} tbody tr')]"
    texts = f"{rows}.map(r => r.textContent)"
    before = browser.evaluate(texts)
    heads = browser.evaluate(f"document.querySelectorAll('{table} thead th').length")
    for column in range(heads):
        head = f"document.querySelectorAll('{table} thead th')[{column}]"
        key = f"r => r.cells[{column}].dataset.value"
        for way, sign in (("ascending", 1), ("descending", -1)):
            browser.evaluate(f"{head}.querySelector('button').click()")
            assert browser.evaluate(f"{head}.getAttribute('aria-sort')") == way
            order = [v for v in browser.evaluate(f"{rows}.map({key})") if v is not None]
            numbers = [float(v) for v in order if v != "nan"]
            assert numbers == sorted(numbers, reverse=sign < 0)
            assert order[len(numbers) :] == ["nan"] * (len(order) - len(numbers))
        assert sorted(browser.evaluate(texts)) == sorted(before)
    sorted_heads = f"document.querySelectorAll('{table} th:not([aria-sort=none])[scope=col]')"
    assert browser.evaluate(f"{sorted_heads}.length") == 1


def test_headers_work_with_the_keyboard(made: Made, browser: Browser) -> None:
    browser.open(made.many)
    button = f"document.querySelector('{TABLE} thead button')"
    browser.evaluate(f"{button}.focus()")
    assert browser.evaluate(f"document.activeElement === {button}")
    browser.press("Enter", 13, "\r")
    assert browser.evaluate(f"{button}.closest('th').getAttribute('aria-sort')") == "ascending"
    assert browser.evaluate(FIRST) == sorted(browser.evaluate(FIRST))


def test_charts_follow_the_colour_scheme(made: Made, browser: Browser) -> None:
    """Dark on a screen; light on paper, whatever the screen has."""
    line = "getComputedStyle(document.querySelector('#curves-round .mark-line path')).stroke"
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for name, scheme, media in (
        ("light", "light", ""),
        ("dark", "dark", ""),
        ("paper", "dark", "print"),
    ):
        browser.media(scheme, media)
        browser.open(made.page)
        seen[name] = browser.evaluate(line), browser.evaluate(ground)
        assert browser.errors == []
    browser.media("light")
    assert seen["light"][0] == "rgb(0, 114, 178)" and seen["dark"][0] == "rgb(86, 180, 233)"
    assert seen["dark"][1] == "rgb(15, 20, 26)" and seen["paper"] == (
        seen["light"][0],
        "rgb(255, 255, 255)",
    )


def test_paper_has_the_summary_of_all_runs_on_few_pages(made: Made, browser: Browser) -> None:
    """Whichever view is on the screen."""
    browser.media("light", "print")
    browser.width(703)  # A4 less its margins
    browser.open(made.many)
    browser.evaluate("document.getElementById('tab-sites').click()")
    assert browser.evaluate(OVERFLOW) == 0
    seen = "[...document.querySelectorAll('section, details.run')].filter(e => e.offsetHeight)"
    shown = browser.evaluate(f"{seen}.map(e => e.id)")
    assert shown == ["in-short", "comparison", "all-curves", "all-cost"]
    paper = browser.paper()
    assert paper.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 6
    browser.media("light")


def test_every_chart_keeps_its_role_and_label(made: Made, browser: Browser) -> None:
    """After drawing: Vega gives its own to the element that it draws into."""
    browser.width(1200)
    browser.open(made.many)
    browser.evaluate("document.querySelectorAll('.view').forEach(v => v.hidden = false)")
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [n for n in nodes if not n["ignored"] and n["role"]["value"] in ("image", "img")]
    said = {n["name"]["value"] for n in roles}
    charts = Page(made.many.read_text(encoding="utf-8")).charts
    assert len(charts) >= 10
    for chart in charts:
        assert chart["aria-label"] in said
    every = " ".join(str(n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"])
    assert "Vega" not in every


def test_legend_hides_and_shows_series(made: Made, browser: Browser) -> None:
    browser.width(1200)
    browser.open(made.many)
    chart = "document.querySelector('#all-curves-round')"
    lines = f"{chart}.querySelectorAll('.mark-line path').length"
    entry = f"{chart}.querySelector('.entry')"
    assert browser.evaluate(f"{chart}.querySelectorAll('.entry').length") == 3
    assert browser.evaluate(lines) == 3
    browser.evaluate(f"{entry}.focus()")
    browser.press("Enter", 13, "\r")
    browser.until(f"{lines} === 2")
    assert browser.evaluate(f"{entry}.getAttribute('aria-pressed')") == "false"
    browser.width(1000)  # drawn again: the choice stays
    browser.until(f"{chart}.querySelector('svg').viewBox.baseVal.width < 500")
    browser.until(f"{lines} === 2")
    browser.evaluate(f"{entry}.click()")
    browser.until(f"{lines} === 3")
    assert browser.errors == []
    browser.width(1200)


def test_numbers_and_pictures_are_downloaded(made: Made, browser: Browser, tmp_path: Path) -> None:
    browser.open(made.many)
    browser.downloads(tmp_path)
    before = list(browser.requests)

    def fetch(button: str, name: str) -> Path:
        browser.evaluate(f"document.querySelector({json.dumps(button)}).click()")
        path = tmp_path / name
        limit = time.monotonic() + 20
        while not path.exists() and time.monotonic() < limit:
            time.sleep(0.02)
            browser.evaluate("1")
        return path

    curve = fetch("#all-curves-round [aria-label$='as CSV']", "all-curves-round.csv")
    rows = list(csv.DictReader(curve.read_text(encoding="utf-8").splitlines()))
    shown = Page(made.many.read_text(encoding="utf-8")).specs["all-curves-round"]
    values = next(iter(shown["datasets"].values())) if "datasets" in shown else None
    assert len(rows) == 2 + 2 + 3 and {row["series"] for row in rows} >= {"pfedbayes", "fedavg"}
    assert values is None or len(values) == len(rows)
    assert all(0 <= float(row["mean"]) <= 100 for row in rows)
    table = fetch("#comparison .tools [aria-label$='as CSV']", "comparison.csv")
    assert table.read_text(encoding="utf-8").count("\n") == 4
    folded = fetch("#comparison details .tools [aria-label$='as CSV']", "comparison-2.csv")
    by_metric = list(csv.DictReader(folded.read_text(encoding="utf-8").splitlines()))
    assert {row["metric"] for row in by_metric} == {"accuracy", "NLL", "AUROC"}
    picture = fetch("#all-curves-round [aria-label$='as PNG']", "all-curves-round.png")
    with Image.open(picture) as image:
        assert image.width > 600 and image.height > 500
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None and (0, 114, 178) in {colour for _, colour in colours}
    assert browser.errors == []
    fetched = [r for r in browser.requests if not r.startswith(("data:", "blob:"))]
    assert fetched == [r for r in before if not r.startswith(("data:", "blob:"))]


def test_a_name_is_no_formula_in_a_spreadsheet(made: Made, browser: Browser) -> None:
    browser.open(made.many)
    row = "document.querySelector('#comparison tbody tr')"
    for name, cell in (("=1+2", "'=1+2"), ('a "b", c', '"a ""b"", c"'), ("-3.5", "-3.5")):
        browser.evaluate(f"{row}.cells[0].textContent = {json.dumps(name)}")
        text = browser.evaluate(f"corefedTables.csv({row}.closest('table'))")
        assert text.splitlines()[1].startswith(f"{cell},")


def test_sites_are_searched_and_sorted(made: Made, browser: Browser) -> None:
    browser.open(made.many)
    browser.evaluate("document.getElementById('tab-sites').click()")
    table = "document.querySelector('#run-2-clients table.filtered')"
    rows = f"[...{table}.tBodies[0].rows].filter(r => !r.hidden)"
    names = f"{rows}.map(r => r.cells[0].textContent)"
    assert browser.evaluate(f"{rows}.length") == 4
    field = "document.querySelector('#run-2-clients input[type=search]')"
    browser.evaluate(f"{field}.value = 'CLIENT 3'")
    browser.evaluate(f"{field}.dispatchEvent(new Event('input'))")
    assert browser.evaluate(names) == ["client 3"]
    assert browser.evaluate("document.querySelector('#run-2-clients output').value") == (
        "1 of 4 rows"
    )
    browser.evaluate(f"{field}.value = ''")
    browser.evaluate(f"{field}.dispatchEvent(new Event('input'))")
    browser.evaluate(f"{table}.tHead.querySelector('button').click()")
    assert browser.evaluate(names) == [f"client {i}" for i in range(4)]


def test_seven_columns_first_and_all_on_demand(made: Made, browser: Browser) -> None:
    browser.open(made.many)
    every = f"[...document.querySelectorAll('{TABLE} th[scope=col]')]"
    heads = f"{every}.filter(h => h.offsetWidth)"
    assert browser.evaluate(f"{heads}.length") == 7
    button = "document.querySelector('#comparison .tools button[aria-expanded]')"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(f"{heads}.length") == browser.evaluate(f"{every}.length")
    assert browser.evaluate(f"{button}.getAttribute('aria-expanded')") == "true"
    browser.width(390)  # the first column stays where it is
    browser.evaluate("document.querySelector('#comparison .scroll').scrollLeft = 200")
    name = "document.querySelector('#comparison tbody th').getBoundingClientRect().left"
    assert 0 <= browser.evaluate(name) < 40
    browser.width(1200)


def test_views_are_switched_by_mouse_keyboard_and_link(made: Made, browser: Browser) -> None:
    browser.open(made.many)
    seen = "[...document.querySelectorAll('.view')].filter(v => !v.hidden).map(v => v.id)"
    assert browser.evaluate(seen) == ["view-summary"]
    browser.evaluate("document.getElementById('tab-coresets').click()")
    assert browser.evaluate(seen) == ["view-coresets"]
    browser.evaluate("document.getElementById('tab-coresets').focus()")
    browser.press("ArrowRight", 39)
    assert browser.evaluate(seen) == ["view-summary"]
    browser.press("End", 35)
    assert browser.evaluate(seen) == ["view-coresets"]
    selected = "document.querySelector('[role=tab][aria-selected=true]')"
    assert browser.evaluate(f"{selected} === document.activeElement")
    browser.evaluate("location.hash = '#run-2-classes'")
    browser.until("document.querySelector('#run-2-sites').open")
    assert browser.evaluate(seen) == ["view-sites"]
    assert browser.errors == []


def test_link_into_a_folded_run_opens_it(made: Made, browser: Browser) -> None:
    browser.width(1200)
    browser.open(made.many)
    browser.evaluate("location.hash = '#run-2'")
    browser.until("document.querySelector('#run-2').open")
    assert browser.errors == []


def test_without_javascript_everything_is_there(made: Made, browser: Browser) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=made.many.as_uri())
        browser.until("document.querySelector('footer') !== null")
        assert browser.evaluate("document.querySelectorAll('figure table').length") >= 10
        views = "[...document.querySelectorAll('.view')]"
        assert browser.evaluate(f"{views}.map(v => v.offsetHeight > 100)") == [True] * 3
        assert browser.evaluate("document.querySelector('.tabs').offsetHeight") == 0
        columns = "[...document.querySelectorAll('#comparison th[scope=col]')]"
        assert browser.evaluate(f"{columns}.every(c => c.offsetWidth > 0)")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
