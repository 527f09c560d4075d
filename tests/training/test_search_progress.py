"""The bar of a search: it names the leader, and leaves room for itself."""

from __future__ import annotations

import os

import pytest

from corefed.base.progress import Bars
from corefed.training.candidates import Standing
from corefed.training.search_progress import search_progress

LEADER = {"zeta": 0.0222, "eta_1": 0.0357, "optimizer": "adam"}


def test_bar_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []
    columns = 200
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    monkeypatch.setattr(Bars, "show", lambda *a, line: shown.append((a[-1], line)))
    first = Standing(6, 60, 1, [3, 12], 6, {}, float("inf"), False)
    rung = Standing(18, 60, 1, [3, 12], 4, LEADER, 0.15661, True)
    with search_progress() as show:
        show(first)
        show(rung)
        show(rung._replace(rung=2, left=4))
        columns = 80
        show(rung)
    texts, lines = zip(*shown, strict=True)
    assert texts[0] == "1/2  6 left"
    assert texts[1] == "1/2  4 left  NLL 0.157: zeta=0.0222 eta_1=0.0357 optimizer=adam"
    assert len(texts[3]) == 32 and texts[3].endswith("…")
    leader = "best NLL 0.1566 with zeta=0.0222, eta_1=0.0357, optimizer=adam"
    assert lines == (
        "",
        f"rung 1 of 2, round 3: {leader}; 4 candidates go on",
        f"rung 2 of 2, round 12: {leader}",
        f"rung 1 of 2, round 3: {leader}; 4 candidates go on",
    )
