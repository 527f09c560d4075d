"""The tables of docs/leaders.md: all settings side by side, from the lines of the study alone."""

from __future__ import annotations

from math import inf
from statistics import fmean
from typing import NamedTuple

from corefed_studies.leaders.cells import SHOWN, Line
from corefed_studies.leaders.report import mean_of_seeds
from corefed_studies.leaders.results import Lines
from corefed_studies.leaders.rows import ONLY_NAMED, ROWS
from corefed_studies.leaders.settings import PAPER, LeadersSetting
from corefed_studies.pages import Table

MARK = "leaders-overview"
"""Of a page that shows these tables, in place of one for each setting."""

SHARED = (
    "shared-start", "shared-start, coreset 10 %", "pfedbayes", "fedavg", "fedavg, momentum",
    "fedprox", "scaffold",
)  # fmt: skip
"""Rows whose shared models are shown."""

ASIDE = {
    *ONLY_NAMED, "shared-start, plain, global", "shared-start, plain, coreset 10 %",
    "shared-start, control",
}  # fmt: skip
"""Rows that answer a question of their own, and are in the full results alone."""


class Done(NamedTuple):
    """What is on record of a setting."""

    setting: LeadersSetting
    lines: dict[str, Line]  # by row

    def has(self, row: str, kind: str) -> bool:
        return kind in self.lines.get(row, {}).get("metrics", {})

    def told(self, row: str, kind: str) -> str:
        if not self.has(row, kind):
            return "-"
        line = self.lines[row]
        accuracy = 100 * mean_of_seeds(line, kind, "accuracy")
        return f"{accuracy:.2f}, {mean_of_seeds(line, kind, 'nll'):.3f}"

    def behind(self, row: str) -> float:
        """Points of accuracy of the personal model below the best one's."""
        each = {
            other: mean_of_seeds(line, "personal", "accuracy")
            for other, line in self.lines.items()
            if self.has(other, "personal")
        }
        return 100 * (max(each.values()) - each[row])


def tables(lines: Lines) -> list[Table]:
    """Personal models by method and setting; shared models by setting and method."""
    done = [
        Done(
            setting,
            {
                row: line
                for (name, row, part), line in lines.items()
                if name == setting.name and part == SHOWN and "failure" not in line
            },
        )
        for setting in PAPER
    ]
    done = [each for each in done if each.lines]
    return [_personal(done), _shared(done)] if done else []


def _personal(done: list[Done]) -> Table:
    """Rows that every setting has come first, those that are least behind before the others."""
    done = [each for each in done if each.setting.judged == "personal"]
    names = [
        row.name
        for row in ROWS
        if row.name not in ASIDE and any(each.has(row.name, "personal") for each in done)
    ]
    behind = {
        row: fmean(each.behind(row) for each in done)
        for row in names
        if all(each.has(row, "personal") for each in done)
    }
    rows = [
        (
            row,
            f"{behind[row]:.2f}" if row in behind else "-",
            *(each.told(row, "personal") for each in done),
        )
        for row in sorted(names, key=lambda row: behind.get(row, inf))
    ]
    columns = ("", "points behind", *(each.setting.short for each in done))
    note = (
        "Accuracy in % and NLL of clients' own models on their own test points, means over three "
        "seeds. Points behind: accuracy below the best of a column, mean over the columns."
    )
    return Table("Personal models", columns, rows, note)


def _shared(done: list[Done]) -> Table:
    rows = [(each.setting.short, *(each.told(row, "global") for row in SHARED)) for each in done]
    note = (
        "Accuracy in % and NLL of the shared model on the test points of all clients. On "
        "NIID-Bench settings were chosen by the shared model. Elsewhere they were chosen by the "
        "personal model where a method has one."
    )
    return Table("Shared models", ("", *SHARED), rows, note)
