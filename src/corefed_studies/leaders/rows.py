"""The methods that are compared. What the registry does not know is left out, and said.

A row's personal model is `personal`, or `localized` where the method has only that: the shared
model after the client's steps. FedAvg's figure is that of its shared model; the same run after the
local steps is a row of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from corefed.methods import registry
from corefed_studies.leaders.settings import POSTERIOR_ROWS, Flags, LeadersSetting


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


OWN_OR_STEPS = ("personal", "localized")


def _row(name: str, rank: int, method: str = "", **flags: object) -> LeadersRow:
    return LeadersRow(name, {"method": method or name, **flags}, rank)


_SEEN: Flags = {"selector": "seen", "refresh_every": 5}
# The best of 0, 0.5 and 0.8 on validation points of four settings of CIFAR-10 with TUNING_SEED.
_MOMENTUM: Flags = {"server_momentum": 0.8}
_START: Flags = {"learning_rate": 0.07, **_MOMENTUM}
_PLAIN: Flags = {"learning_rate": 0.2, "server_momentum": 0.0}
_AVERAGE: Flags = {"learning_rate": 0.023, **_MOMENTUM}  # a third of FedAvg's rate without momentum

FINE_TUNED = "fedavg-ft"
ALONE = "independent"

ROWS = (
    _row("shared-start", 0, **_START),
    _row("pfedbayes", 0),
    _row("fedavg", 0),
    _row("fedavg, momentum", 0, "fedavg", **_AVERAGE),
    _row(ALONE, 0),
    _row("coreset, 10 %", 0, "coreset-pfedbayes", fraction=0.1),
    _row("shared-start, coreset 10 %", 1, "coreset-shared-start", fraction=0.1, **_START, **_SEEN),
    LeadersRow(FINE_TUNED, {"method": FINE_TUNED}, 1, OWN_OR_STEPS),
    LeadersRow("fedavg-ft, momentum", {"method": FINE_TUNED, **_AVERAGE}, 1, OWN_OR_STEPS),
    _row("ditto", 1),
    _row("fedrep", 1),
    _row("feddbe", 1),
    _row("scaffold", 1),
    _row("coreset, 50 %", 1, "coreset-pfedbayes", fraction=0.5),
    _row("coreset, 10 %, seen", 1, "coreset-pfedbayes", fraction=0.1, **_SEEN),
    _row("fedprox", 2),
    _row("fedbabu", 2),
    _row("pfedme", 2),
    _row("per-fedavg", 2),
    # What is left of shared-start without momentum, and what control variates do there.
    _row("shared-start, plain", 2, "shared-start", **_PLAIN),
    # Tuned for its shared model, as FedAvg and SCAFFOLD are: a better personal model may choose
    # settings that make a worse shared one.
    LeadersRow(
        "shared-start, plain, global", {"method": "shared-start", **_PLAIN}, 2, judged="global"
    ),
    LeadersRow(
        "shared-start, control",
        {"method": "shared-start", "control": 1.0, "personal": "own", **_PLAIN},
        2,
        judged="global",
    ),
    _row("shared-start, plain, coreset 10 %", 2, "coreset-shared-start", fraction=0.1, **_PLAIN),
    _row("coreset, 15 %", 2, "coreset-pfedbayes", fraction=0.15),
    _row("coreset, 30 %", 2, "coreset-pfedbayes", fraction=0.3),
    _row("random, 50 %", 2, "random-subset", fraction=0.5),
    _row("pfedbayes, ivon", 2, "pfedbayes", optimizer="ivon", eta_1=0.05),
    _row(
        "shared-start, ivon", 2, "shared-start", **_MOMENTUM, optimizer="ivon", learning_rate=0.005
    ),
    _row("pfedbayes, last layer", 2, "pfedbayes", bayesian="last"),
    _row("shared-start, last layer", 2, "shared-start", **_START, bayesian="last"),
)
PAPER_SIZES = ("coreset, 15 %", "coreset, 30 %", "random, 50 %")
"""Rows of the paper's tables."""
ONLY_NAMED = (*PAPER_SIZES, *POSTERIOR_ROWS)
"""Rows for the settings that name them."""


def known_rows(setting: LeadersSetting) -> tuple[list[LeadersRow], list[str]]:
    """The rows of a setting whose methods there are, and the names of the others.

    Without a method of that name, FedAvg's row after local steps is FedAvg's own run.
    """
    found, missing = [], []
    for row in ROWS:
        wanted = row.name in setting.rows if setting.rows else row.name not in ONLY_NAMED
        if not wanted and row.name not in setting.more:
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
