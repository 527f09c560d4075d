"""Small runs, pages about them, and what a parser sees of a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from commands import SMALL, corefed

NASTY = "<script>alert(1)</script>"
BASE = tuple(flag for flag in SMALL if not flag.startswith("--method"))


class Made(NamedTuple):
    """Runs and pages that all tests look at."""

    one: Path  # coreset-pfedbayes on digits, with a client of a nasty name
    runs: list[Path]
    page: Path  # of that run
    many: Path  # of three runs


def make(folder: Path) -> Made:
    runs = []
    for name, flags in (
        ("coreset", ("--method=coreset-pfedbayes", "--fraction=0.2", "--set=draws=8")),
        ("full", ("--method=pfedbayes",)),
        ("fedavg", ("--method=fedavg", "--rounds=3")),
    ):
        runs.append(folder / name)
        assert corefed("run", *BASE, *flags, "--quiet", f"--out={runs[-1]}").code == 0
    about = json.loads((runs[0] / "data.json").read_text())
    about["clients"][0][1]["name"] = NASTY
    (runs[0] / "data.json").write_text(json.dumps(about))
    page, many = folder / "new" / "one.html", folder / "many.html"
    written = corefed("report", runs[0], "--out", page, "--title", f"A & B {NASTY}")
    assert written.code == 0, written.err
    assert str(page) in written.out
    assert corefed("report", *runs, "--out", many).code == 0
    return Made(runs[0], runs, page, many)


class Page(HTMLParser):
    """What a page holds, as a parser sees it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.levels: list[int] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.images: list[dict[str, str | None]] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self.policy = ""
        self._script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.tags.append(tag)
        self.ids += [own["id"] or ""] if "id" in own else []
        self.levels += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.addresses += [own[name] or "" for name in ("src", "href") if name in own]
        self.policy += (own.get("content") or "") if "http-equiv" in own else ""
        self.charts += [own] if "data-chart" in own else []
        self.images += [own] if tag == "img" else []
        self._script = (own.get("id") or str(len(self.scripts))) if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self._script = ""

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = data
        else:
            self.words.append(data)

    @property
    def specs(self) -> dict[str, Any]:
        specs: dict[str, Any] = json.loads(self.scripts["specs"])
        return specs
