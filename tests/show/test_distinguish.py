"""Two runs are never taken for one another: labels, the table of a comparison and its legend."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import made
from rich.console import Console

from corefed.show import report
from corefed.show.distinguish import differences, labels, words

SCORES, LOSS = [0.9, 0.91, 0.92], [0.3, 0.31, 0.32]


def test_labels_name_what_differs() -> None:
    runs = [
        made("pfedbayes", SCORES, LOSS, path="a"),
        made("pfedbayes", SCORES, LOSS, path="b", eta_1=0.003, zeta=0.03),
        made("coreset-pfedbayes", SCORES, LOSS),
    ]
    assert labels(runs) == [
        "pfedbayes (zeta 1, eta_1 0.001)",
        "pfedbayes (zeta 0.03, eta_1 0.003)",
        "coreset-pfedbayes (20 %)",
    ]
    assert differences(runs)[2] == {"zeta": 1.0, "eta_1": 0.001}  # as in one of the others


def test_runs_with_the_same_settings_have_their_folder() -> None:
    runs = [made("pfedbayes", SCORES, LOSS, path=path) for path in ("x/a", "x/b")]
    assert labels(runs) == ["pfedbayes (a)", "pfedbayes (b)"]
    runs = [made("pfedbayes", SCORES, LOSS, path=path) for path in ("x/a", "y/a")]
    assert labels(runs) == ["pfedbayes (x/a)", "pfedbayes (y/a)"]
    runs = [*runs, made("pfedbayes", SCORES, LOSS, path="z", zeta=2.0)]
    assert labels(runs) == ["pfedbayes (zeta 1, x/a)", "pfedbayes (zeta 1, y/a)",
                            "pfedbayes (zeta 2)"]  # fmt: skip


def test_many_differences_are_a_folder_in_a_label() -> None:
    other = {"zeta": 2.0, "eta_1": 0.1, "local_steps": 5, "hidden": [7, 8]}
    runs = [made("pfedbayes", SCORES, LOSS, path="a"),
            made("pfedbayes", SCORES, LOSS, path="b", **other)]  # fmt: skip
    assert labels(runs) == ["pfedbayes (a)", "pfedbayes (b)"]
    assert words(differences(runs)[1]) == "local_steps 5, hidden 7,8, zeta 2, eta_1 0.1"
    assert words({str(i): i for i in range(10)}, most=2) == "0 0, 1 1, 8 more settings"


def test_settings_of_unrelated_methods_are_not_compared() -> None:
    """A learning rate of one method says nothing about another's."""
    runs = [made("independent", SCORES, LOSS), made("random-subset", SCORES, LOSS),
            made("coreset-pfedbayes", SCORES, LOSS, zeta=3.0)]  # fmt: skip
    assert differences(runs) == [{}, {"zeta": 1.0}, {"zeta": 3.0}]
    on_fedavg = made("random-subset", SCORES, LOSS, base="fedavg")
    assert differences([on_fedavg, made("fedavg", SCORES, LOSS, learning_rate=0.5)]) == [
        {"learning_rate": 0.02}, {"learning_rate": 0.5},
    ]  # fmt: skip


def test_the_same_label_never_twice() -> None:
    """Over all pairs of a few runs that differ in this or that."""
    kinds = [
        {},
        {"zeta": 2.0},
        {"eta_1": 0.1},
        {"local_steps": 5},
        {"seeds": [0, 1]},
        {"zeta": 2.0},
    ]
    runs = []
    for i, kind in enumerate(kinds):
        seeds = kind.pop("seeds", [0, 1, 2])
        size = len(seeds)
        runs.append(
            made("pfedbayes", SCORES[:size], LOSS[:size], seeds=seeds, path=f"r/{i}", **kind)
        )
    for chosen in (runs, runs[1:], runs[::2], runs[:2]):
        assert len(set(labels(chosen))) == len(chosen)


@pytest.mark.parametrize("score", ["accuracy", "rmse"])
def test_the_table_fits_a_terminal(score: str) -> None:
    runs = [
        made("coreset-pfedbayes", SCORES, LOSS, score=score, passes=1.2345e6, complete=False),
        made("coreset-pfedbayes", SCORES, LOSS, score=score, path="b/c", zeta=0.03),
        made("fedavg", SCORES, LOSS, score=score, model="global", seconds=1234.5, rounds=12),
    ]
    out = io.StringIO()
    Console(file=out, width=report.WIDTH, color_system=None).print(report.comparison_table(runs))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 + len(runs), out.getvalue()  # title, heads, rule: nothing is folded
    assert max(map(len, lines)) <= 80
    head = lines[1].split()
    scores = ["personal", "global", "±", "NLL", "ECE"]
    assert head == ["method", "k/n", *scores, "sec", "passes"]
    assert "≥1.23 M" in lines[3] and "1 k" in lines[4]
    assert report.legend(runs) == [
        "1  runs/coreset-pfedbayes: zeta 1",
        "2  b/c: zeta 0.03",
        "3  runs/fedavg: rounds 12 of 30",
        "≥: a lower bound; what selecting the points took is not counted.",
    ]


def test_numbers_with_a_unit() -> None:
    assert [report.short(n) for n in (0, 999, 999.6, 269_999, 1.35e6, 2.5e9, 1.2e13)] == [
        "0", "999", "1 k", "270 k", "1.35 M", "2.5 G", "1.2e+04 G",
    ]  # fmt: skip


def test_json_has_label_folder_and_differences() -> None:
    runs = [made("pfedbayes", SCORES, LOSS, path="a"),
            made("pfedbayes", SCORES, LOSS, path="b", zeta=0.03)]  # fmt: skip
    one, two = report.comparison_json(runs)
    assert one["folder"] == "a" and Path(two["folder"]) == Path("b")
    assert (one["label"], one["differs_in"]) == ("pfedbayes (zeta 1)", {"zeta": 1.0})
    assert two["differs_in"] == {"zeta": 0.03}
