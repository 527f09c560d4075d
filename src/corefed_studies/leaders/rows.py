"""The methods that are compared. What the registry does not know is left out, and said.

A row's personal model is `personal`, or `localized` where the method has only that: the shared
model after the client's steps. FedAvg's figure is that of its shared model; the same run after the
local steps is a row of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from corefed.methods import registry
from corefed_studies.leaders.settings import Flags, LeadersSetting


class LeadersRow(NamedTuple):
    name: str
    flags: Flags
    rank: int  # 0: the first to be trained
    personal: tuple[str, ...] = ("personal",)  # kinds of models that are its personal one
    judged: Literal["", "global"] = ""  # the model that its candidates are compared by; "": the
    # setting says it

    @property
    def method(self) -> str:
        return str(self.flags["method"])


def _row(name: str, rank: int, method: str = "", **flags: object) -> LeadersRow:
    return LeadersRow(name, {"method": method or name, **flags}, rank)


_CONTROL = {"control": 1.0, "personal": "own"}
_SEEN = {"selector": "seen", "refresh_every": 5}

SHARED = "shared-start, global"
"""Tuned for its shared model, as FedAvg and SCAFFOLD are: a better personal model may choose settings
that make a worse shared one."""
CONTROL = "shared-start, control"
"""With SCAFFOLD's control variates; tuned for its shared model too."""
FINE_TUNED = "fedavg-ft"
ALONE = "independent"

ROWS = (
    _row("shared-start", 0),
    _row("pfedbayes", 0),
    _row("fedavg", 0),
    _row(ALONE, 0),
    _row("coreset, 10 %", 0, "coreset-pfedbayes", fraction=0.1),
    LeadersRow(FINE_TUNED, {"method": FINE_TUNED}, 1, ("personal", "localized")),
    _row("ditto", 1),
    _row("fedrep", 1),
    _row("feddbe", 1),
    _row("scaffold", 1),
    _row("coreset, 50 %", 1, "coreset-pfedbayes", fraction=0.5),
    _row("shared-start, coreset 10 %", 1, "coreset-shared-start", fraction=0.1),
    LeadersRow(SHARED, {"method": "shared-start"}, 0, judged="global"),
    LeadersRow(CONTROL, {"method": "shared-start", **_CONTROL}, 1, judged="global"),
    _row("coreset, 10 %, seen", 1, "coreset-pfedbayes", fraction=0.1, **_SEEN),
    _row("fedprox", 2),
    _row("fedbabu", 2),
    _row("pfedme", 2),
    _row("per-fedavg", 2),
)


def known_rows(setting: LeadersSetting) -> tuple[list[LeadersRow], list[str]]:
    """The rows of a setting whose methods there are, and the names of the others.

    Without a method of that name, FedAvg's row after local steps is FedAvg's own run.
    """
    found, missing = [], []
    for row in ROWS:
        if setting.rows and row.name not in setting.rows:
            continue
        if row.name == FINE_TUNED and row.method not in registry.METHODS:
            row = row._replace(flags={"method": "fedavg"})
        if row.method in registry.METHODS:
            found.append(row)
        else:
            missing.append(row.name)
    return found, missing


def row_of(setting: LeadersSetting, name: str) -> LeadersRow:
    return next(row for row in known_rows(setting)[0] if row.name == name)
