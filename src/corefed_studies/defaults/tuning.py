"""What `corefed tune` adds on problems that the defaults were not made for.

As a user would: for each seed a search of 16 candidates on a fifth of the training points, then
training with what was found on all of them. Compared on test points, seed by seed, with the
defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corefed.settings.config import resolve
from corefed.settings.fields import to_flat
from corefed.training.candidates import VALIDATION, plan
from corefed.training.search import search
from corefed_studies.defaults.judging import FULL, ROWS, SEEDS, Cell, measure
from corefed_studies.defaults.problems import DefaultsProblem, flags
from corefed_studies.reproduce.cells import Flags


def place_of(folder: Path, problem: str) -> Path:
    return folder / "tuning" / f"{problem}.json"


def train(problem: DefaultsProblem, files_in: Path, device: str) -> dict[str, Any]:
    """Search and train once per seed."""
    own, model = ROWS[FULL]
    shared: Flags = {**flags(problem, files_in), **own, "device": device}
    quiet: Flags = {"checkpoint_every": 0, "evaluate_every": 1000}
    cells: dict[str, list[Cell]] = {"tuned": [], "defaults": []}
    before, after, chosen, passes = [], [], [], 0.0
    for seed in SEEDS:
        mine: Flags = {**shared, "seeds": (seed,)}
        found = search(plan(resolve(flags={**mine, "validation": VALIDATION})))
        by_number = {each["number"]: each for each in found.report["candidates"]}
        number = found.report["chosen"]["number"]
        before.append(by_number[0]["nll"])
        after.append(by_number[number]["nll"])
        passes += sum(each["passes"] for each in by_number.values())
        settings = by_number[number]["settings"] if number else {}
        chosen.append(settings)
        values = {name: to_flat(found.experiment.settings)[name] for name in settings}
        cells["tuned"].append(measure({**mine, **quiet, **values}, model))
        cells["defaults"].append(measure({**mine, **quiet}, model))
    return {
        "chosen": chosen,
        "validation": [sum(each) / len(each) for each in (before, after)],
        "passes": passes,
        **{name: _joined(each) for name, each in cells.items()},
    }


def _joined(cells: list[Cell]) -> Cell:
    """One cell of all seeds."""
    names = cells[0]["metrics"]
    return {
        "metrics": {name: [each["metrics"][name][0] for each in cells] for name in names},
        "cost": {key: sum(each["cost"][key] for each in cells) for key in cells[0]["cost"]},
    }
