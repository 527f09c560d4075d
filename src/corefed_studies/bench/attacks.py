"""`corefed bench attacks`: clients that lie, against every rule of a federation.

    one of five     every attack of `attacks_liars.py` by one of five clients, PFedBayes on digits
    FedAvg          those that aim at weights without posteriors, or at claimed counts
    two of seven    sybils: two clients that do the same
    nobody lies     what robust rules cost where clients' data differ

Numbers are accuracies of the honest clients' own test points, means over seeds (`attacks_runs.py`).
Cells are kept in cells.jsonl of the output folder; a command that was stopped goes on with them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.federation.trust import robust
from corefed_studies import pages
from corefed_studies.bench import study
from corefed_studies.bench.attacks_liars import ATTACKS, FEDAVG, MAIN_ATTACKS, TWO
from corefed_studies.bench.attacks_runs import RULES, Cell, run

NAME = "attacks"
AIM = 2.0
"""Points of accuracy that a bad client may cost at most under the default."""
FIELDS = ("rounds", "seeds", "cells")
METHODS = ("pfedbayes", "fedavg")
MAIN_RULES = ("plain", "default")
"""Under which every attack is run. The others meet the attacks on the aggregation."""
SPLITS = ("iid", "labels:5", "dirichlet:0.3")


class AttackSetting(NamedTuple):
    """How much is run at a scale."""

    seeds: tuple[int, ...]
    rounds: int
    attacks: tuple[str, ...]
    fedavg: tuple[str, ...]
    two: tuple[str, ...]
    splits: tuple[str, ...]


SETTINGS = {
    "paper": AttackSetting((0, 1, 2), 6, tuple(ATTACKS), FEDAVG, TWO, SPLITS),
    "quick": AttackSetting((0,), 2, ("none", "sign flip x19", "wild mean"), (), ("none",), ()),
}


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    source: Path | None = None,
) -> None:
    """Run the cells, or read them from `source`, and write the tables into `out` and a page."""
    if device not in ("auto", "cpu"):
        raise UserError(f"bench {NAME} runs on a CPU; device is {device!r}, leave it out.")
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    if source is not None:
        found = study.read(source, NAME, FIELDS)
    else:
        setting = SETTINGS[scale]
        about = study.about(NAME, scale, torch.device("cpu"))
        measured = _run_all(_plan(setting), folder / "cells.jsonl", console)
        numbers = {"rounds": setting.rounds, "seeds": len(setting.seeds), "cells": measured}
        found = study.write(folder / f"{NAME}.json", {**about, **numbers})
    shown = tables(found)
    pages.put(folder, NAME, shown, marked)
    console.print(pages.markdown(shown), markup=False, soft_wrap=True)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def _plan(setting: AttackSetting) -> list[Cell]:
    """Every seed in turn, so that a command that was stopped has whole tables of some."""
    plan: list[Cell] = []
    for seed in setting.seeds:
        honest = Cell("pfedbayes", "plain", "none", seed=seed, rounds=setting.rounds)
        for rule in RULES:
            main = rule in MAIN_RULES
            attacks = [each for each in setting.attacks if main or each in MAIN_ATTACKS]
            one = honest._replace(rule=rule)
            fedavg, two = one._replace(method="fedavg"), one._replace(clients=7, bad=2)
            plan += [one._replace(attack=each) for each in attacks]
            plan += [fedavg._replace(attack=each) for each in setting.fedavg if main]
            plan += [two._replace(attack=each) for each in setting.two]
        plan += [
            honest._replace(split=split, rule=rule, method=method)
            for split in setting.splits
            for rule in ("plain", "default", "median")
            for method in METHODS
        ]
    return list(dict.fromkeys(plan))


def _run_all(plan: Sequence[Cell], kept: Path, console: Console) -> list[dict[str, Any]]:
    """One row per cell without its seed, with a value per seed."""
    done = _read_cells(kept)
    with bars(console=console) as shown, kept.open("a", encoding="utf-8") as file:
        for number, cell in enumerate(plan):
            shown.show("federations", number, len(plan), f"{cell.rule}, {cell.attack}")
            if cell not in done:
                done[cell] = run(cell)
                file.write(json.dumps({"cell": cell, "found": done[cell]}) + "\n")
                file.flush()
    rows: dict[Cell, list[dict[str, Any]]] = {}
    for cell in plan:
        rows.setdefault(cell._replace(seed=0), []).append(done[cell])
    return [_row(cell, found) for cell, found in rows.items()]


def _read_cells(kept: Path) -> dict[Cell, dict[str, Any]]:
    if not kept.exists():
        return {}
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    return {Cell(*line["cell"]): line["found"] for line in lines}


def _row(cell: Cell, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds, by kind of model; none where a seed's run stopped."""
    stopped = [each["rounds"] for each in found if each["stopped"]]
    row: dict[str, Any] = {
        "method": cell.method, "rule": cell.rule, "attack": cell.attack, "clients": cell.clients,
        "bad": cell.bad, "split": cell.split, "stopped_after": stopped,
    }  # fmt: skip
    for key in ("accuracy", "reported", "median"):
        kinds = found[0][key]
        row[key] = (
            {}
            if stopped
            else {kind: statistics.fmean(each[key][kind] for each in found) for kind in kinds}
        )
    return row


# --- the tables -----------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[pages.Table]:
    cells = found["cells"]
    tried = {cell["attack"] for cell in cells}
    what = [[name, attack.words] for name, attack in ATTACKS.items() if name in tried]
    shown = [
        pages.Table("The attacks", ["attack", "what the bad client does"], what),
        _attacks(found, "pfedbayes", 5, "personal"),
        _attacks(found, "pfedbayes", 5, "global"),
        _attacks(found, "fedavg", 5, "global"),
        _attacks(found, "pfedbayes", 7, "personal"),
        _reported(cells),
        _costs(cells),
    ]
    return [table for table in shown if table.rows]


def heading(rule: str) -> str:
    return f"default ({robust.AUTO})" if rule == "default" else rule


def _attacks(found: Mapping[str, Any], method: str, clients: int, kind: str) -> pages.Table:
    mine = {
        (cell["attack"], cell["rule"]): cell
        for cell in found["cells"]
        if (cell["method"], cell["clients"], cell["split"]) == (method, clients, "iid")
    }
    attacked = {rule for attack, rule in mine if attack != "none"}
    rules = [rule for rule in RULES if rule in attacked]
    attacks = [name for name in ATTACKS if any(name == other for other, _ in mine)]
    bad = next((cell["bad"] for cell in mine.values()), 0)
    rows = [[name, *(_cell(mine.get((name, rule)), kind) for rule in rules)] for name in attacks]
    words = "one" if bad == 1 else str(bad)
    return pages.Table(
        f"{method}, {kind} model: accuracy in % with {words} of {clients} clients bad",
        ["attack", *map(heading, rules)],
        rows if any(attack != "none" for attack in attacks) else [],
        f"Of the honest clients' test points, means over {_seeds(found)} after "
        f"{found['rounds']} rounds. {_verdict(mine, kind)}",
    )


def _seeds(found: Mapping[str, Any]) -> str:
    return f"{found['seeds']} seed{'s' if found['seeds'] > 1 else ''}"


def _cell(cell: Mapping[str, Any] | None, kind: str) -> str:
    if cell is None:
        return ""
    if cell["stopped_after"]:
        return f"stops in round {min(cell['stopped_after']) + 1}"
    return f"{100 * cell['accuracy'][kind]:.1f}"


def _verdict(mine: Mapping[tuple[str, str], Mapping[str, Any]], kind: str) -> str:
    """What the worst attack costs under the default, and where the aim is missed."""
    costs: dict[str, float] = {}
    honest = mine.get(("none", "default"), {}).get("accuracy", {}).get(kind)
    for (attack, rule), cell in mine.items():
        if rule == "default" and attack != "none" and honest is not None:
            costs[attack] = 100 * (honest - cell["accuracy"].get(kind, 0.0))
    if not costs:
        return ""
    worst = max(costs, key=lambda attack: costs[attack])
    missed = [f"{name} ({costs[name]:.1f})" for name in costs if costs[name] > AIM]
    text = f"Under the default the worst attack, {worst}, costs {costs[worst]:.1f} points"
    aim = f"the aim of at most {AIM:g} is"
    return f"{text}; {aim} missed by: {', '.join(missed)}." if missed else f"{text}; {aim} reached."


def _reported(cells: Sequence[Mapping[str, Any]]) -> pages.Table:
    """What the server reports where a client lies about its test points."""
    mine = [
        cell
        for cell in cells
        if cell["attack"] == "perfect score" and cell["method"] == "pfedbayes" and cell["accuracy"]
    ]
    keys = ("accuracy", "reported", "median")
    rows = [
        [heading(cell["rule"]), *(f"{100 * cell[key]['global']:.2f}" for key in keys)]
        for cell in mine
    ]
    return pages.Table(
        "A client claims that all of its 10^7 test points are right: accuracy in %, global model",
        ["rule", "honest clients", "reported, pooled", "reported, median over clients"],
        rows,
    )


def _costs(cells: Sequence[Mapping[str, Any]]) -> pages.Table:
    """Without an attack, where clients' data differ."""
    found = {
        (cell["method"], cell["split"], cell["rule"]): cell["accuracy"]
        for cell in cells
        if cell["attack"] == "none" and cell["clients"] == 5 and cell["accuracy"]
    }
    rules = ("plain", "default", "median")
    rows = []
    for method, kind in (("pfedbayes", "personal"), ("pfedbayes", "global"), ("fedavg", "global")):
        for split in dict.fromkeys(split for _, split, _ in found):
            each = [found.get((method, split, rule)) for rule in rules]
            shown = [f"{100 * one[kind]:.1f}" for one in each if one is not None]
            rows += [[f"{method}, {kind}", split, *shown]] if len(shown) == len(rules) else []
    return pages.Table(
        "Nobody lies: accuracy in % by how the data are split between 5 clients",
        ["method, model", "split", *map(heading, rules)],
        rows if any(row[1] != "iid" for row in rows) else [],
        "labels:5 gives each client 5 of the 10 classes, dirichlet:0.3 unequal shares of each.",
    )
